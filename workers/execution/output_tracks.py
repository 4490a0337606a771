"""Output tracks of one step on this rank: one chunk writer per track.

In a later attempt, nodes compute their chunks without `token_ids` (audio, embeddings, echoes of the prompt)
again, in the same order. Each is compared with the chunk that an earlier attempt released: an equal one is
not emitted again, a different one ends the step with `Divergence` before a client sees any of it. Chunks
beyond the released ones are new and are emitted. Tokens are not computed again;
`workers.execution.kv_nodes` replays them.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from shared.errors import Divergence
from shared.events import OutputTotals
from workers.execution.recovered_output import RecoveredTrack
from workers.generation.output_chunks import Chunker, OutputState, OutputStream, PostChunk
from workers.orders.inbox import StepKey


class OutputTracks:
    """The tracks that this rank writes in one step.

    Args:
        tracks: by output node, its track.
        recovered: by track, its state at the start of the step.
    """

    def __init__(
        self,
        key: StepKey,
        tracks: Mapping[str, str],
        recovered: Mapping[str, RecoveredTrack],
        post: PostChunk,
        *,
        choice: int = 0,
    ) -> None:
        self._tracks = tracks
        self._recovered = {
            name: recovered.get(name) or RecoveredTrack() for name in sorted({*tracks.values()})
        }
        self._released = {name: deque(track.released) for name, track in self._recovered.items()}
        self._streams = {
            name: OutputStream(
                Chunker(
                    track.state, request_id=key.request_id, attempt=key.attempt, choice=choice, track=name
                ),
                post,
            )
            for name, track in self._recovered.items()
        }

    @property
    def states(self) -> dict[str, OutputState]:
        """The current state of each track."""
        return {name: track.state for name, track in self._recovered.items()}

    def of(self, node: str) -> OutputStream:
        """The writer of an output node's track."""
        return self._streams[self._tracks[node]]

    def release(self, node: str, content: Mapping[str, Any]) -> None:
        """Emit a chunk without tokens, unless an earlier attempt has released it.

        Raises:
            Divergence: an earlier attempt released a different chunk at this position.
        """
        if not self.consume_released(node, content):
            self.of(node).add_content(content)

    def consume_released(self, node: str, content: Mapping[str, Any]) -> bool:
        """Take the next released chunk, and return True if there was one: `content` is not emitted again.

        Call it once for each chunk, in order.

        Raises:
            Divergence: an earlier attempt released a different chunk at this position.
        """
        released = self._released[self._tracks[node]]
        if not released:
            return False
        expected = released.popleft()
        differing = [name for name, value in content.items() if getattr(expected, name) != value]
        if differing:
            raise Divergence(
                f"chunk {expected.index} of node {node!r}: expected what an earlier attempt released, "
                f"found a different {' and '.join(sorted(differing))}; a node must give the same output for "
                "the same inputs"
            )
        return True

    async def wait_stored(self) -> dict[str, OutputTotals]:
        """Wait until all output is stored; return the totals of each track.

        Raises:
            Divergence: a released chunk was not computed again.
        """
        if missing := sum(map(len, self._released.values())):
            raise Divergence(
                f"{missing} chunks were released by an earlier attempt and did not come out again; "
                "a node must give the same output for the same inputs"
            )
        return {name: await stream.wait_stored() for name, stream in self._streams.items()}

    def close(self) -> None:
        """Stop all output."""
        for stream in self._streams.values():
            stream.close()
