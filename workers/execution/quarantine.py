"""Whether a step on probation is further than it was when a worker died under it (ADR 9).

Pure, over the chunks of this attempt that are stored. A rank says it once, when all its nodes that put out
something are further:

- a row, once `TOKENS` more of its tokens are stored: fewer, and one more death at the same place would
  count for the first again and again;
- any other node, once a chunk is stored that no earlier attempt had put out.

An echo is no progress: the prompt is put out before it is computed. A rank none of whose nodes puts out
anything says nothing; that the step is done says it all.
"""

from collections.abc import Mapping
from typing import Final

from models.base import EngineKind
from shared.events import OutputChunk
from workers.execution.recovered_output import RecoveredTrack

TOKENS: Final = 8


class QuarantineProgress:
    """One order's.

    Args:
        speaking: by the node that speaks here: its track.
        kinds: the nodes' engines.
        recalled: the tracks as the order found them.
    """

    def __init__(
        self,
        speaking: Mapping[str, str],
        kinds: Mapping[str, EngineKind],
        recalled: Mapping[str, RecoveredTrack],
    ) -> None:
        self._rows = {track for node, track in speaking.items() if kinds[node] is EngineKind.KV}
        self._others = {track for node, track in speaking.items() if kinds[node] is not EngineKind.KV}
        self._before = sum(len(recalled[track].prefix_ids) for track in self._rows if track in recalled)
        self._new: dict[str, int] = dict.fromkeys(self._rows, 0)
        self._told = not speaking

    @property
    def tokens(self) -> int:
        """How many tokens of its rows' answers are stored, those of earlier attempts included."""
        return self._before + sum(self._new.values())

    def stored(self, chunk: OutputChunk) -> bool:
        """A chunk of this attempt is stored; True once, when that makes the progress that was missing."""
        if chunk.token_ids and chunk.track in self._new:
            self._new[chunk.track] += len(chunk.token_ids)
        elif not chunk.token_ids and not chunk.is_echo:
            self._others.discard(chunk.track)
        is_further = not self._others and all(count >= TOKENS for count in self._new.values())
        if self._told or not is_further:
            return False
        self._told = True
        return True
