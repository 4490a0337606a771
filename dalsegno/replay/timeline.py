"""A replayed history as a sequence of positions: the state after each record. Pure.

Requests are immutable, so a position only keeps references, and a history of ten thousand records can be
stepped through in both directions. A position is identified by its record's number in the log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from conductor.core.replay import Replayer, Verdict
from conductor.core.request import Request, World
from dalsegno.bundle import manifest
from dalsegno.history.event_description import summary_of, type_of
from models.base import ModelGraph
from shared.epoch_fence import EpochFence
from shared.errors import ClientError
from shared.events import AnyEvent
from shared.log.port import StoredRecord
from shared.request_output import RequestOutput
from shared.subjects import Subjects


class TimelinePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The state after one record.

    Attributes:
        event: the record's event; None if it cannot be read.
        requests: the known requests, by id.
        verdicts: each request's verdict so far.
    """

    record: StoredRecord
    event: AnyEvent | None
    requests: dict[str, Request]
    world: World
    leader: str
    epoch: int
    verdicts: dict[str, Verdict]


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """One value of the state that differs between two positions; None where it does not exist."""

    name: str
    before: Any
    after: Any


class ReplayTimeline:
    """A history, replayed once.

    Args:
        requests: the ids whose states are kept.
        incomplete: see `Replayer`.
    """

    def __init__(
        self,
        records: Iterable[StoredRecord],
        requests: Sequence[str],
        *,
        graph_of: Callable[[str], ModelGraph],
        subjects: Subjects,
        incomplete: frozenset[str] = frozenset(),
    ) -> None:
        self.subjects = subjects
        self.requests = requests
        replayer = Replayer(graph_of, subjects, incomplete=incomplete)
        self.positions = [self._taken(replayer, record) for record in records]
        if self.positions:  # missing decisions are known only at the end
            closed = self._verdicts(replayer.close())
            self.positions[-1] = msgspec.structs.replace(self.positions[-1], verdicts=closed)

    def _taken(self, replayer: Replayer, record: StoredRecord) -> TimelinePosition:
        replayer.replay_record(record)
        cluster = replayer.cluster
        known = {one: found for one in self.requests if (found := cluster.request(one)) is not None}
        return TimelinePosition(
            record=record,
            event=manifest.event_of(record, self.subjects),
            requests=known,
            world=cluster.world,
            leader=cluster.leader,
            epoch=cluster.fence.epoch,
            verdicts=self._verdicts(replayer.verdicts),
        )

    def _verdicts(self, found: dict[str, Verdict]) -> dict[str, Verdict]:
        """Copies of the verdicts: the replayer continues to update its own."""
        return {one: replace(found[one]) for one in self.requests if one in found}

    # ---- finding -----------------------------------------------------------------------------------
    def find(self, where: str, start: int = 0) -> int:
        """Return the index of the position that `where` names, from 0.

        A number is a log position, or the last record before it. A name is an event's id, or an event type:
        then the first such event at or after index `start`.

        Raises:
            ClientError: there is none.
        """
        if where.isdecimal():
            return self._at(int(where))
        for place in range(start, len(self.positions)):
            event = self.positions[place].event
            if event is not None and where in _names(event):
                return place
        kinds = dict.fromkeys(
            tag.rpartition(".")[0]
            for one in self.positions
            if one.event is not None
            for tag in [_tag(one.event)]
        )
        raise ClientError(
            f"no record here is {where!r}: expected a position from {self.positions[0].record.seq} to "
            f"{self.positions[-1].record.seq}, an event's id, or one of {', '.join(kinds)}"
        )

    def _at(self, seq: int) -> int:
        place = sum(one.record.seq <= seq for one in self.positions) - 1
        if place < 0:
            raise ClientError(f"this history begins with record {self.positions[0].record.seq}, after {seq}")
        return place

    # ---- state -------------------------------------------------------------------------------------
    def state(self, place: int) -> dict[str, Any]:
        """The state after a record, as plain data: of each request, and of the workers."""
        position = self.positions[place]
        found: dict[str, Any] = {
            "world": {
                "leader": position.leader,
                "epoch": position.epoch,
                "ranks": plain(position.world.ranks),
            }
        }
        outputs = self._outputs(place)
        for request_id, request in position.requests.items():
            found[request_id] = _state(request) | {"output": outputs.get(request_id, {})}
        return found

    def difference(self, before: int, after: int) -> list[StateChange]:
        """The values of the state that differ between the indices `before` and `after`."""
        was, becomes = dict(leaves(self.state(before))), dict(leaves(self.state(after)))
        return [
            StateChange(name=name, before=was.get(name), after=becomes.get(name))
            for name in dict.fromkeys((*was, *becomes))
            if was.get(name) != becomes.get(name)
        ]

    def _outputs(self, place: int) -> dict[str, Any]:
        """The valid output of each request up to an index."""
        outputs: dict[str, RequestOutput] = {}
        texts: dict[str, str] = {}
        tokens: dict[str, int] = {}
        fence = EpochFence()
        for position in self.positions[: place + 1]:
            event, address = position.event, self.subjects.parse(position.record.subject)
            if event is None or address is None or not fence.admits(event):
                continue
            if (request_id := str(address.request_id)) not in self.requests:
                continue
            for chunk in outputs.setdefault(request_id, RequestOutput()).fold(address, event):
                texts[request_id] = texts.get(request_id, "") + chunk.text
                tokens[request_id] = tokens.get(request_id, 0) + len(chunk.token_ids)
        return {
            request_id: {
                "chunks": output.transcript.totals.chunks,
                "tokens": tokens.get(request_id, 0),
                "text": texts.get(request_id, ""),
            }
            for request_id, output in outputs.items()
            if output.transcript.totals.chunks
        }


def plain(value: Any) -> Any:
    """A value of the state as JSON values: bytes in hex, keys as strings, sets sorted."""
    return _as_json(msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=True, order="deterministic"))


def _as_json(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {str(name): _as_json(item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_as_json(item) for item in value]
        case _:
            return value


def _state(request: Request) -> dict[str, Any]:
    """A request's state, without the long values that its records contain."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(request):
        value = getattr(request, field.name)
        match field.name:
            case "submission" | "id":
                continue
            case "admitted":
                found["seed"] = None if value is None else value.seed
            case "expected":
                found["expected"] = {
                    name: f"{type_of(decision)}: {summary_of(decision)}" for name, decision in value.items()
                }
            case "recorded":
                found["recorded"] = sorted(value)
            case "results":
                found["results"] = {
                    str(index): {walk.name: plain(walk.facts) for walk in result.walks}
                    for index, result in value
                }
            case _:
                found[field.name] = plain(value)
    return found


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is neither a map nor a list of maps, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            yield from leaves(item, f"{name}[{place}]")
    else:
        yield name, value


def _names(event: AnyEvent) -> set[str]:
    tag = _tag(event)
    return {event.id, tag, tag.rpartition(".")[0]}


def _tag(event: AnyEvent) -> str:
    return str(event.__struct_config__.tag)
