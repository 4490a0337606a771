"""Progress of a step in quarantine since a worker died while it ran (ADR 9).

A request whose step was running when a worker died is a suspected poison pill. Its next attempt runs in
quarantine, and the rank reports once (`walk.progressed`) when all its output nodes have made progress:

- a KV node, once `TOKENS` more of its tokens are stored. With fewer, one more death at the same place would
  again count as the first;
- any other node, once a chunk is stored that no earlier attempt had emitted.

An echo is no progress, because the prompt is emitted before it is computed; nor is an advisory chunk. A rank
without output nodes reports no progress; its completed step is report enough. Pure: the input is the stored
chunks of this attempt.
"""

from collections.abc import Mapping
from typing import Final

from models.base import EngineKind
from shared.events import OutputChunk
from workers.execution.recovered_output import RecoveredTrack

TOKENS: Final = 8


class QuarantineProgress:
    """Progress of one order.

    Args:
        tracks: by output node of this rank, its track.
        kinds: the engine of each node.
        recovered: the tracks at the start of the order.
    """

    def __init__(
        self,
        tracks: Mapping[str, str],
        kinds: Mapping[str, EngineKind],
        recovered: Mapping[str, RecoveredTrack],
    ) -> None:
        kv_tracks = {track for node, track in tracks.items() if kinds[node] is EngineKind.KV}
        self._without_progress = {track for node, track in tracks.items() if kinds[node] is not EngineKind.KV}
        self._earlier_tokens = sum(len(recovered[track].prefix_ids) for track in kv_tracks & recovered.keys())
        self._new_tokens: dict[str, int] = dict.fromkeys(kv_tracks, 0)
        self._is_reported = not tracks

    @property
    def tokens(self) -> int:
        """The stored tokens of this step's sequences, including those of earlier attempts."""
        return self._earlier_tokens + sum(self._new_tokens.values())

    def stored(self, chunk: OutputChunk) -> bool:
        """Take a stored chunk of this attempt; return True once, when the step has made enough progress."""
        if chunk.token_ids and chunk.track in self._new_tokens:
            self._new_tokens[chunk.track] += len(chunk.token_ids)
        elif not (chunk.token_ids or chunk.is_echo or chunk.advisory):
            self._without_progress.discard(chunk.track)
        is_further = not self._without_progress and all(
            count >= TOKENS for count in self._new_tokens.values()
        )
        if self._is_reported or not is_further:
            return False
        self._is_reported = True
        return True
