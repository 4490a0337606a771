"""Output of a simulated worker in one step: it continues after the recovered output, without duplicates.

Real code: the output recovery (`workers.execution.recovered_output`), which finds this step's chunks in the
log and the state of its track. Tokens continue after the recovered ones. Media are computed again from the
beginning, and have to equal the released chunks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from shared.errors import WeightsChangedError
from shared.events import NodeReady, OutputChunk, OutputTotals
from shared.subjects import worker_writer
from tests.conductor.script import SUBJECTS
from tests.simulation.models import Part, token
from workers.execution.recovered_output import OutputRecovery, RecoveredTrack
from workers.generation.output_chunks import OutputState
from workers.orders.inbox import StepKey

if TYPE_CHECKING:
    from tests.simulation.workers import Worker

MOST_AT_ONCE: Final = 3
"""So many tokens are in one chunk at most."""


class DivergedError(Exception):
    """Media computed again differ from the released chunks."""


class OtherWeightsError(Exception):
    """Output was released that another checkpoint had computed."""


class Speaker:
    """One step's part of one track.

    Attributes:
        said: the number of items that this step has emitted, including earlier attempts; `new`, in this
            one.
        chunks: the number of media chunks computed, including the released ones.
        released: the released chunks that still have to be computed again.
    """

    def __init__(
        self, worker: "Worker", key: StepKey, order: NodeReady, seq: int, part: Part, first: int
    ) -> None:
        self.said = self.new = self.chunks = 0
        self.released: list[OutputChunk] = []
        self._worker = worker
        self._sim = worker.sim
        self._key = key
        self._order = order
        self._seq = seq  # where the order is stored
        self._part = part
        self._first = first  # the number of the step's first item
        self._recall = OutputRecovery(SUBJECTS, key, seq)
        self._recall.complete = key.attempt == 1 and key.step == 0
        self._cursor = 0
        self._state: OutputState | None = None

    # ---- what is there already ---------------------------------------------------------------------
    @property
    def knows_where_it_stands(self) -> bool:
        """True once the recovered output is complete; reads it if the log answers."""
        if self._state is None and self._has_read():
            self._begin(self._recall.result().get(self._part.track) or RecoveredTrack())
        return self._state is not None

    def _has_read(self) -> bool:
        if not self._recall.complete and self._worker.is_reachable:
            self._read()
        if self._recall.complete:
            try:
                self._recall.check_weights(self._order.weights_since)
            except WeightsChangedError:
                raise OtherWeightsError from None
        return self._recall.complete

    def _read(self) -> None:
        """Fold the request's records: up to its order for a first attempt, else up to its fence."""
        log, is_first = self._sim.log, self._key.attempt == 1
        end = self._seq if is_first else log.last_seq
        while self._cursor < end and not self._recall.complete:
            address = log.addresses[self._cursor]
            self._cursor += 1
            if address.request_id == self._key.request_id or address.name == "epoch":
                self._recall.fold(log.records[self._cursor - 1])
                self._worker.line.highest = max(self._worker.line.highest, self._cursor)
        if is_first:  # it has no fence to wait for
            self._recall.complete = True

    def _begin(self, recalled: RecoveredTrack) -> None:
        ids = recalled.prefix_ids
        checkpoint = self._worker.checkpoint
        expected = tuple(
            token(self._key.request_id, self._first + place, checkpoint) for place in range(len(ids))
        )
        assert ids == expected, f"{self._key}: recalled {ids} of what it said before, expected {expected}"
        self._state, self.released, self.said = recalled.state, list(recalled.released), len(ids)

    # ---- what is new -------------------------------------------------------------------------------
    def say_tokens(self, most: int, post: Callable[[str, OutputChunk], None]) -> None:
        """Emit the next few tokens; up to `most` of this step."""
        assert self._state is not None
        request_id = self._key.request_id
        at_once = 1 if request_id in self._sim.poisons else MOST_AT_ONCE  # it dies of the very token
        count = min(most - self.said, self._sim.random.randint(1, at_once))
        start = self._first + self.said
        self.said, self.new = self.said + count, self.new + count
        self._put(
            post,
            text=self._said(start, start + count),
            text_offset=self._state.text_offset,
            token_ids=[
                token(request_id, item, self._worker.checkpoint) for item in range(start, start + count)
            ],
            token_offset=self._state.token_offset,
        )

    def say_medium(self, post: Callable[[str, OutputChunk], None]) -> None:
        """Compute the next media chunk; emit it unless it was released before.

        Raises:
            DivergedError: a different chunk was released.
        """
        size = self._part.cut.count
        start = self.chunks * size
        data = self._said(start, start + size).encode()
        if self.released:
            if self._sim.random.random() < self._sim.plan.p_other:
                data += b"!"
            if self.released[0].data != data:
                raise DivergedError
            self.released.pop(0)
            self._sim.saw("a medium comes out again as it was")
        else:
            self.new += 1
            self._put(post, modality="audio", data=data)
        self.chunks += 1

    def _said(self, start: int, stop: int) -> str:
        track, request_id = self._part.track, self._key.request_id
        return self._sim.model.said(track, request_id, start, stop, self._worker.checkpoint)

    def _put(self, post: Callable[[str, OutputChunk], None], **content: Any) -> None:
        assert self._state is not None
        order, track, index = self._order, self._part.track, self._state.track.next_index
        request_id, writer = self._key.request_id, worker_writer(self._worker.rank)
        chunk = OutputChunk(
            id=f"{request_id}.out.{order.attempt}.{track}.{index}.{order.incarnation}",
            writer=writer,
            request_id=request_id,
            attempt=order.attempt,
            incarnation=order.incarnation,
            index=index,
            track=track,
            **content,
        )
        assert self._state.track.fold(chunk) == [chunk]
        self._state.fold(chunk)
        post(SUBJECTS.output(order.origin, request_id, writer), chunk)

    @property
    def totals(self) -> dict[str, Any]:
        """The track's totals for a report; empty if this step never emitted output."""
        if self._state is None:
            return {}
        totals: OutputTotals = self._state.track.totals
        return {"tracks": {self._part.track: totals}} if self._part.track else {"output": totals}
