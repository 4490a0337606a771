"""The output of a request before a step: remembered from the previous step, or recovered from the log."""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from shared.checkpoints import State
from shared.log.port import Log
from shared.subjects import Subjects
from workers.execution.recovered_output import OutputRecovery, RecoveredTrack
from workers.execution.step_placement import StepPlacement
from workers.generation.output_chunks import OutputState
from workers.orders.inbox import StepKey


@dataclass(frozen=True, slots=True)
class Recovered:
    """The output that a step continues.

    Attributes:
        tracks: by name, where the step needs them.
        checkpoints: the newest states of runs of programs and of loops, by place.
    """

    tracks: Mapping[str, RecoveredTrack] = field(default_factory=dict)
    checkpoints: Mapping[str, State] = field(default_factory=dict)


MAX_REMEMBERED: Final = 4096
"""The number of requests whose track states are remembered between steps; others come from the log."""


class TrackStates:
    """The track states of all requests on this rank."""

    def __init__(self, log: Log, subjects: Subjects) -> None:
        self._log = log
        self._subjects = subjects
        self._states: OrderedDict[str, dict[str, OutputState]] = OrderedDict()

    async def before(
        self, key: StepKey, placement: StepPlacement, seq: int, weights_since: int = 0
    ) -> Recovered:
        """The output that a step continues; its order is stored at `seq`.

        Raises:
            WeightsChangedError: output of attempts before `weights_since` was released.
        """
        names = {*placement.tracks.values()}
        if key.attempt <= 1:
            if key.step == 0 or not names:
                return Recovered()
            known = self._states.get(key.request_id)
            if known is not None and all(map(placement.is_only_writer, placement.tracks)):
                return Recovered({name: RecoveredTrack(state=known[name]) for name in names if name in known})
        elif not names and not placement.may_resume:
            return Recovered()
        recovery = OutputRecovery(self._subjects, key, seq)
        # Chunks of earlier steps precede this step's order in the log. A fence may still be on its way.
        reads = self._log.history if key.attempt <= 1 else self._log.read
        async with aclosing(reads(recovery.subjects(), 1)) as records:
            async for record in records:
                recovery.fold(record)
                if recovery.complete:
                    break
        recovery.check_weights(weights_since)
        return Recovered(recovery.result(), recovery.checkpoints(weights_since))

    def remember(self, request_id: str, states: dict[str, OutputState]) -> None:
        """Remember the track states after a step."""
        self._states[request_id] = self._states.get(request_id, {}) | states
        self._states.move_to_end(request_id)
        while len(self._states) > MAX_REMEMBERED:
            self._states.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._states.pop(request_id, None)
