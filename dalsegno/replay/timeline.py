"""A replayed history as a sequence of positions: the state after each record. Pure.

Requests are immutable, so a position only keeps references, and a history of ten thousand records can be
stepped through in both directions. A position is identified by its record's number in the log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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


class _Written(NamedTuple):
    """The valid output of a request up to a position: numbers of chunks, tokens and characters."""

    chunks: int
    tokens: int
    characters: int


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
        self._fence = EpochFence()
        self._outputs_so_far: dict[str, RequestOutput] = {}
        self._texts: dict[str, list[str]] = {}
        self._whole_texts: dict[str, str] = {}
        self._written: list[dict[str, _Written]] = []
        replayer = Replayer(graph_of, subjects, incomplete=incomplete)
        self.positions = [self._taken(replayer, record) for record in records]
        if self.positions:  # missing decisions are known only at the end
            closed = self._verdicts(replayer.close())
            self.positions[-1] = msgspec.structs.replace(self.positions[-1], verdicts=closed)

    def _taken(self, replayer: Replayer, record: StoredRecord) -> TimelinePosition:
        replayer.replay_record(record)
        cluster = replayer.cluster
        known = {one: found for one in self.requests if (found := cluster.request(one)) is not None}
        event = manifest.event_of(record, self.subjects)
        self._note_output(record, event)
        return TimelinePosition(
            record=record,
            event=event,
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

    def changes(self, name: str) -> Iterator[tuple[int, StateChange]]:
        """Yield every change of one value of the state: the index of the record that made it, and the values.

        Args:
            name: the path of the value, as in `StateChange`.
        """
        root, _, field = name.partition(".")
        owner: object = None
        value: Any = None
        for place, position in enumerate(self.positions):
            now = self._owner(place, position, root, field)
            if now is owner or (isinstance(now, tuple) and now == owner):
                continue
            owner, before = now, value
            if field.startswith("output."):
                value = self._outputs(place).get(root, {}).get(field.removeprefix("output."))
            else:
                value = dict(leaves(self.state(place))).get(name)
            if value != before:
                yield place, StateChange(name=name, before=before, after=value)

    def _owner(self, place: int, position: TimelinePosition, root: str, field: str) -> object:
        """The immutable object that holds a value of the state: while it is the same, so is the value."""
        if root == "world":
            return position.leader, position.epoch, id(position.world)
        if field.startswith("output"):
            return self._written[place].get(root)
        return position.requests.get(root)

    def _outputs(self, place: int) -> dict[str, Any]:
        """The valid output of each request up to an index."""
        return {
            request_id: {
                "chunks": written.chunks,
                "tokens": written.tokens,
                "text": self._text(request_id)[: written.characters],
            }
            for request_id, written in self._written[place].items()
            if written.chunks
        }

    def _text(self, request_id: str) -> str:
        whole = self._whole_texts.get(request_id)
        if whole is None:
            whole = self._whole_texts[request_id] = "".join(self._texts.get(request_id, []))
        return whole

    def _note_output(self, record: StoredRecord, event: AnyEvent | None) -> None:
        """Fold a record into the outputs; the text up to a position is a prefix of the whole text."""
        before = self._written[-1] if self._written else {}
        self._written.append(before)
        address = self.subjects.parse(record.subject)
        if event is None or address is None or not self._fence.admits(event):
            return
        if (request_id := str(address.request_id)) not in self.requests:
            return
        output = self._outputs_so_far.setdefault(request_id, RequestOutput())
        _, tokens, characters = before.get(request_id, _Written(0, 0, 0))
        for chunk in output.fold(address, event):
            self._texts.setdefault(request_id, []).append(chunk.text)
            tokens += len(chunk.token_ids)
            characters += len(chunk.text)
        written = _Written(output.transcript.totals.chunks, tokens, characters)
        if written != before.get(request_id):
            self._written[-1] = before | {request_id: written}


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
