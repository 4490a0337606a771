"""Execution of one order by a simulated worker, in small pieces.

A sequence is prefilled on one rank and decoded there or on another, to which it is handed over. A stream is
sent item by item and consumed. Everything else is done at once.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from shared.events import (
    EdgeEvent,
    Event,
    Failure,
    NodeFired,
    NodeReady,
    SequenceHandover,
    StreamSent,
    StreamTotals,
    TensorsReleased,
    WalkBegun,
    WalkFailed,
    WalkProgressed,
)
from shared.subjects import worker_writer
from shared.tensors import Handle
from shared.walks import chunks_of
from tests.conductor import speech
from tests.conductor.script import SUBJECTS
from tests.simulation.questions import FURTHER
from tests.simulation.speaking import DivergedError, OtherWeightsError, Speaker
from workers.orders.inbox import StepKey

if TYPE_CHECKING:
    from tests.simulation.workers import Worker


@dataclass(slots=True)
class Items:
    """The items of a stream received in one attempt."""

    numbers: set[int] = field(default_factory=set)
    total: int | None = None

    def take(self, sent: StreamSent) -> None:
        """Receive more items, or the end."""
        count = sent.items.shape[0] if sent.items is not None else 0
        self.numbers |= set(range(sent.index, sent.index + count))
        if sent.end:
            self.total = sent.index + count

    @property
    def there(self) -> int:
        """The number of items without a gap."""
        return next(number for number in range(len(self.numbers) + 1) if number not in self.numbers)


class Job:
    """One rank's part of one order."""

    def __init__(self, worker: "Worker", key: StepKey, order: NodeReady, seq: int) -> None:
        self.key, self.order = key, order
        self._worker = worker
        self._sim = worker.sim
        self._model = worker.sim.model
        self._first_walk, self._walk = order.walks[0].name, order.walks[-1].name
        self._part = self._model.parts[self._walk]
        self._first, self._stop = self._span()
        self._speaker = Speaker(worker, key, order, seq, self._part, self._first)
        self._is_checked = False
        self._row: tuple[int, Handle] | None = None  # from which rank; None until it is heard of
        self._row_is_read = self._row_is_sent = self._row_is_back = False
        self._sent = self._first  # items of streams: the number of the next
        self._has_begun = self._says_it_begins = False
        self._has_progressed = False
        self._unacked = 0  # events on their way into the log that the report must be behind

    def _span(self) -> tuple[int, int]:
        """The number of a decoding walk's first token, and the number after its last."""
        args = self.order.walks[-1].args
        first: int = args.get("first", 0) if self._part.does == "talk" else 0
        return first, first + int(args.get("max_tokens", 0))

    def _runs(self, walk: str) -> bool:
        return self._model.rank_of(self.order, walk) == self._worker.rank

    # ---- one step ----------------------------------------------------------------------------------
    def step(self) -> bool:
        """Do the next piece, if that is possible."""
        if self.order.on_probation and not self._has_begun:
            return self._begin()
        if not self._is_checked:
            self._is_checked = True
            inputs = [handle for walk in self.order.walks for handle in walk.inputs.values()]
            if self._runs(self._first_walk) and self._misses(inputs):
                return True
        if self._is_poisoned():
            self._worker.be_killed_by(self.key.request_id)
            return True
        try:
            match self._part.does:
                case "talk":
                    return self._talk()
                case "listen":
                    return self._listen()
                case _:
                    self._finish()
                    return True
        except DivergedError:
            self._sim.saw("a medium comes out otherwise than before")
            self._fail(Failure(code="replay_divergence", message="it came out otherwise"))
            return True
        except OtherWeightsError:
            self._sim.saw("a worker finds output of another checkpoint")
            self._fail(Failure(code="weights_changed", message="it was begun with another checkpoint"))
            return True

    def hear(self, event: EdgeEvent, rank: int) -> None:
        """Receive an event of another rank for this step."""
        match event:
            case NodeFired():
                assert event.row is not None
                self._row = rank, event.row.kv
            case TensorsReleased():
                self._row_is_back = True
            case _:
                raise AssertionError(event)

    def _is_poisoned(self) -> bool:
        """True if this work kills the worker."""
        poison = self._sim.poisons.get(self.key.request_id)
        is_there = poison is not None and self._walk == poison.walk and self._runs(self._walk)
        return is_there and poison is not None and self._speaker.new >= poison.after

    def _misses(self, handles: list[Handle]) -> bool:
        """Report a lost tensor; return True if there is one."""
        missing = next((one for one in handles if not self._sim.holds(one, self.key, self._worker)), None)
        if missing is not None:
            self._fail(Failure(code="tensor_gone", message=f"{missing.key} is gone"), missing)
        return missing is not None

    # ---- rows --------------------------------------------------------------------------------------
    def _talk(self) -> bool:
        if not self._runs(self._walk):
            return self._hand_on()
        if not self._runs(self._first_walk) and not self._row_is_read:
            return self._take_row()
        if not self._speaker.knows_where_it_stands:
            return False
        has_to_say = self._first + self._speaker.said < self._stop
        has_to_send = self._sent < self._stop and bool(self._streams)
        if has_to_send and (not has_to_say or self._sim.random.random() < 0.5):
            self._send()
        elif has_to_say:
            self._speaker.say_tokens(self._stop - self._first, self._post)
            self._tell_progress(self._speaker.new >= FURTHER)
        elif self._unacked:
            return False
        else:
            self._finish()
        return True

    def _hand_on(self) -> bool:
        """Hand the sequence over to its next rank, and keep it until it has arrived."""
        if self._row_is_sent:
            if self._unacked or not self._row_is_back:
                return False
            self._finish()
            return True
        self._row_is_sent = True
        order, key = self.order, self.key
        name = f"{key.request_id}/{key.attempt}/{key.step}/{self._first_walk}/row"
        self._worker.make(name, scope_of(key))
        row = Handle(
            key=name, dtype="int32", shape=(3,), rank=self._worker.rank, incarnation=order.incarnation
        )
        fired = NodeFired(
            id=f"{order.id}.fired",
            **self._about(),
            index=order.index,
            walk=0,
            node=self._part.node,
            path=(),
            row=SequenceHandover(kv=row, token_ids=[]),
        )
        self._tell(self._model.rank_of(order, self._walk), fired)
        return True

    def _take_row(self) -> bool:
        """Read the sequence that another rank has prefilled, and confirm it."""
        if self._row is None:
            return False
        self._row_is_read = True
        rank, row = self._row
        if not self._misses([row]):
            read = TensorsReleased(
                id=f"{self.order.id}.read", **self._about(), index=self.order.index, keys=[row.key]
            )
            self._tell(rank, read)
        return True

    # ---- streams -----------------------------------------------------------------------------------
    @property
    def _streams(self) -> list[str]:
        return self._model.streams_of(self._sim.kind_of(self.key.request_id))

    def _send(self) -> None:
        """Send the next items to all consumers; the end with the last of them, or after it."""
        start, chance = self._sent, self._sim.random
        self._sent = min(self._stop, start + chance.randint(1, 3))
        for stream in self._streams:
            is_last = self._sent == self._stop and stream in self.order.ends
            is_apart = is_last and chance.random() < 0.5
            walk = self._model.streams[stream]
            sent = StreamSent(
                id=f"{self.order.id}.{stream}.{start}",
                **self._about(),
                index=start,
                stream=stream,
                to=self._model.parts[walk].node,
                items=Handle(
                    key=speech.key_of(self.order, "decode", "talker", f"{stream}.{start}"),
                    dtype="int32",
                    shape=(self._sent - start,),
                    data=b"",
                ),
                end=is_last and not is_apart,
            )
            to = self._model.rank_of(self.order, walk)
            self._tell(to, sent)
            if is_apart:
                end = {"id": f"{self.order.id}.{stream}.end", "index": self._sent, "items": None, "end": True}
                self._tell(to, msgspec.structs.replace(sent, **end))

    def _listen(self) -> bool:
        if not self._speaker.knows_where_it_stands:
            return False
        speaker, part = self._speaker, self._part
        items = self._worker.items[self.key.request_id, self.key.attempt, part.stream]
        if part.track in self._model.tokens:
            if speaker.said < items.there:
                speaker.say_tokens(items.there, self._post)
                self._tell_progress(speaker.new >= FURTHER)
                return True
        elif (speaker.chunks + 1) * part.cut.count <= items.there:
            speaker.say_medium(self._post)
            self._tell_progress(speaker.new > 0)
            return True
        if items.there != items.total or self._unacked:
            return False
        if speaker.released:
            raise DivergedError
        totals = StreamTotals(items=items.there, chunks=chunks_of(part.cut, items.there))
        self._finish(streams={part.stream: totals})
        return True

    # ---- telling -----------------------------------------------------------------------------------
    def _tell(self, rank: int, event: EdgeEvent) -> None:
        event = msgspec.structs.replace(event, to_life=self.order.lives.get(rank))
        if rank == self._worker.rank:
            self._worker.hear(event, rank)
        else:
            self._post(SUBJECTS.edge(rank, self._worker.rank, self.key.request_id), event)

    def _begin(self) -> bool:
        """Report the begin, and wait until it is stored: only then can the order be blamed for a death."""
        if self._says_it_begins:
            return False
        self._says_it_begins = True

        def stored(_: int) -> None:
            self._has_begun = True

        begun = WalkBegun(
            id=f"{self.order.id}.begun",
            **self._about(),
            index=self.order.index,
            rank=self._worker.rank,
        )
        self._worker.post(SUBJECTS.done(self._worker.rank, self.key.request_id), begun, stored)
        return True

    def _tell_progress(self, is_further: bool) -> None:
        """Report once that a quarantined order has made progress."""
        if self._has_progressed or not is_further or not self.order.on_probation:
            return
        self._has_progressed = True
        progressed = WalkProgressed(
            id=f"{self.order.id}.progressed",
            **self._about(),
            index=self.order.index,
            rank=self._worker.rank,
            tokens=self._speaker.said,
        )
        self._worker.post(SUBJECTS.done(self._worker.rank, self.key.request_id), progressed)

    def _finish(self, **changes: Any) -> None:
        done = self._model.report(self.order, **self._speaker.totals, **changes)
        for walk in self.order.walks:
            part = self._model.parts[walk.name]
            for edge in part.makes if self._runs(walk.name) else ():
                self._worker.make(speech.key_of(self.order, walk.name, part.node, edge), self.key.request_id)
        self._report(done)

    def _fail(self, failure: Failure, gone: Handle | None = None) -> None:
        failed = WalkFailed(
            id=f"{self.order.id}.failed",
            **self._about(),
            index=self.order.index,
            rank=self._worker.rank,
            failure=failure,
            gone=gone.key if gone is not None else None,
            gone_rank=gone.rank if gone is not None else None,
            gone_life=gone.incarnation if gone is not None else None,
        )
        self._report(failed)

    def _report(self, event: Event) -> None:
        self._worker.drop(self.key)
        self._worker.post(SUBJECTS.done(self._worker.rank, self.key.request_id), event)

    def _post(self, subject: str, event: Event) -> None:
        """Post an event that the final report has to follow."""

        def stored(_: int) -> None:
            self._unacked -= 1

        self._unacked += 1
        self._worker.post(subject, event, stored)

    def _about(self) -> dict[str, Any]:
        return {
            "writer": worker_writer(self._worker.rank),
            "request_id": self.order.request_id,
            "attempt": self.order.attempt,
            "incarnation": self.order.incarnation,
        }


def scope_of(key: StepKey) -> str:
    """The tensor scope of a step."""
    return f"{key.request_id}/{key.attempt}/{key.step}"
