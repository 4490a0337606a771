"""What a step puts out on this rank: one stream of chunks for each node that speaks here.

What an earlier attempt put out already comes out of the nodes again, in the same order: it is compared, and
not put out. What comes out otherwise ends the step before a client sees any of it. The rest is new.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from shared.errors import Divergence
from shared.events import OutputTotals
from workers.execution.recovered_output import RecoveredTrack
from workers.generation.output_chunks import Chunker, OutputState, OutputStream, PostChunk
from workers.orders.inbox import StepKey

NOTHING: Final[Mapping[str, RecoveredTrack]] = {}


class OutputTracks:
    """The tracks that this rank writes in one step.

    Args:
        names: by the node that speaks.
        recalled: where they stand, by name.
    """

    def __init__(
        self,
        key: StepKey,
        names: Mapping[str, str],
        recalled: Mapping[str, RecoveredTrack],
        post: PostChunk,
        *,
        choice: int = 0,
    ) -> None:
        self._names = names
        self._recalled = {name: recalled.get(name) or RecoveredTrack() for name in sorted({*names.values()})}
        self._released = {name: deque(track.released) for name, track in self._recalled.items()}
        self._streams = {
            name: OutputStream(
                Chunker(
                    track.state, request_id=key.request_id, attempt=key.attempt, choice=choice, track=name
                ),
                post,
            )
            for name, track in self._recalled.items()
        }

    @property
    def states(self) -> dict[str, OutputState]:
        """Where each track stands."""
        return {name: track.state for name, track in self._recalled.items()}

    def of(self, node: str) -> OutputStream:
        """Where a node puts out what it says."""
        return self._streams[self._names[node]]

    def release(self, node: str, content: Mapping[str, Any]) -> None:
        """Put out a chunk of its own, unless an earlier attempt did.

        Raises:
            Divergence: an earlier attempt put out another one in its place.
        """
        if not self.was_released(node, content):
            self.of(node).add_content(content)

    def was_released(self, node: str, content: Mapping[str, Any]) -> bool:
        """Whether an earlier attempt put this chunk out; each is asked for once, in their order.

        Raises:
            Divergence: it put out another one in its place.
        """
        released = self._released[self._names[node]]
        if not released:
            return False
        expected = released.popleft()
        differs = [name for name, value in content.items() if getattr(expected, name) != value]
        if differs:
            raise Divergence(
                f"chunk {expected.index} of node {node!r} was released by an earlier attempt and came out "
                f"otherwise: in its {' and '.join(sorted(differs))}; a node must give the same for the same "
                "inputs"
            )
        return True

    async def stored(self) -> dict[str, OutputTotals]:
        """Wait until all that was put out is stored; what each track then amounts to.

        Raises:
            Divergence: something that was released did not come out again.
        """
        if missing := sum(map(len, self._released.values())):
            raise Divergence(
                f"{missing} chunks were released by an earlier attempt and did not come out again"
            )
        return {name: await stream.stored() for name, stream in self._streams.items()}

    def close(self) -> None:
        """Put nothing out any more."""
        for stream in self._streams.values():
            stream.close()
