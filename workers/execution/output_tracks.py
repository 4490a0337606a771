"""Output tracks of one step on this rank: one chunk writer per track.

In a later attempt, nodes compute their chunks without `token_ids` (audio, images, echoes of the prompt)
again, in the same order. What an earlier attempt has released is not emitted again:

- by default it has to be the same: a chunk that differs ends the step with `Divergence` before a client sees
  any of it;
- for an edge with `on_resume="keep"` it is the value, and nothing is compared (ADR 34). If it is a tensor in
  pieces of which the last ones are missing, the whole tensor is emitted again: its first piece voids them.

Chunks beyond the released ones are new and are emitted. Tokens are not computed again;
`workers.execution.kv_nodes` replays them.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from shared.errors import DalSegnoError, Divergence
from shared.events import OutputChunk, OutputTotals
from shared.output_pieces import PIECE, PIECE_BYTES, piece_of
from shared.telemetry.log_fields import MAY_QUOTE
from workers.execution.recovered_output import RecoveredTrack
from workers.generation.output_chunks import Chunker, OutputState, OutputStream, PostChunk
from workers.orders.inbox import StepKey

_LOGGER: Final = logging.getLogger(__name__)

ReleasedValue: TypeAlias = Sequence[OutputChunk]
"""The chunks of one value that an earlier attempt has released: one, or the pieces of a tensor."""


class OutputTracks:
    """The tracks that this rank writes in one step.

    Args:
        tracks: by output node, its track.
        recovered: by track, its state at the start of the step.
        kept: by output node, the modalities in which released values stand.
    """

    def __init__(
        self,
        key: StepKey,
        tracks: Mapping[str, str],
        recovered: Mapping[str, RecoveredTrack],
        post: PostChunk,
        *,
        choice: int = 0,
        kept: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self._key = key
        self._choice = choice
        self._post = post
        self._advised = 0
        self._tracks = tracks
        self._kept = kept or {}
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

    # ---- advice ------------------------------------------------------------------------------------
    def advise(self, node: str, content: Mapping[str, Any]) -> None:
        """Post an advisory chunk of any node: once, and only if the log takes it now.

        Advice never fails the step: a chunk that cannot be posted is dropped.
        """
        if piece_of(content.get("metadata", {})) is not None:
            if content["metadata"][PIECE] == 0:
                _LOGGER.warning("node %s: a preview above %d bytes was not sent", node, PIECE_BYTES)
            return
        self._post_advisory(node, content)

    def store_checkpoint(self, content: Mapping[str, Any]) -> None:
        """Post a chunk of a checkpoint (`shared.checkpoints`): once, and only if the log takes it now."""
        self._post_advisory("", content)

    def _post_advisory(self, node: str, content: Mapping[str, Any]) -> None:
        key = self._key
        self._advised += 1
        chunk = OutputChunk(
            id=f"{key.request_id}.adv.{key.attempt}.{key.step}.{node}.{self._advised}",
            request_id=key.request_id,
            attempt=key.attempt,
            index=-1,
            choice=self._choice,
            track=node,
            advisory=True,
            **content,
        )
        try:
            self._post(chunk, _ignore_position)
        except DalSegnoError:
            pass  # the log is full, away or refuses it; what has to be stored finds that out itself
        except (TypeError, ValueError) as error:
            _LOGGER.warning("node %s: its progress was not sent: %s", node, error, extra=MAY_QUOTE)

    # ---- released values that stand ----------------------------------------------------------------
    def keeps(self, node: str, modality: str) -> bool:
        """True if the values that an earlier attempt released in this modality stand."""
        return modality in self._kept.get(node, ())

    def has_kept(self, node: str) -> bool:
        """True while a node has released chunks, of which some stand."""
        return node in self._kept and bool(self._released[self._tracks[node]])

    def take_kept(self, node: str, modality: str) -> ReleasedValue | None:
        """Take the next released value, which stands; None if there is none, or only a part of it.

        Call it once for each value, in order.

        Raises:
            Divergence: the next released value is of another modality.
        """
        released = self._released[self._tracks[node]]
        while released:
            if released[0].modality != modality:
                raise Divergence(
                    f"chunk {released[0].index} of node {node!r}: expected output of modality "
                    f"{released[0].modality!r}, as an earlier attempt released it, found {modality!r}; a "
                    "node must give its outputs in the same order in every attempt"
                )
            value, is_whole = _next_value(released)
            for _ in value:
                released.popleft()
            if is_whole:
                return value
        return None

    def released_value(self, node: str, number: int) -> ReleasedValue | None:
        """The released value that the node's next output but `number` stands for; None if there is none."""
        whole = _whole_values(self._released[self._tracks[node]])
        return whole[number] if number < len(whole) else None

    async def wait_stored(self) -> dict[str, OutputTotals]:
        """Wait until all output is stored; return the totals of each track.

        Raises:
            Divergence: a released chunk that does not stand by itself was not computed again.
        """
        if missing := sum(map(self._not_repeated, self._released)):
            raise Divergence(
                f"{missing} chunks were released by an earlier attempt and did not come out again; "
                "a node must give the same output for the same inputs"
            )
        return {name: await stream.wait_stored() for name, stream in self._streams.items()}

    def close(self) -> None:
        """Stop all output."""
        for stream in self._streams.values():
            stream.close()

    def _not_repeated(self, track: str) -> int:
        """The number of a track's released chunks that had to come out again and did not."""
        nodes = (node for node, name in self._tracks.items() if name == track)
        kept = {modality for node in nodes for modality in self._kept.get(node, ())}
        return sum(chunk.modality not in kept for chunk in self._released[track])


def _ignore_position(_seq: int) -> None:
    """Do nothing when an advisory chunk is stored: nobody waits for it."""


def _next_value(chunks: Iterable[OutputChunk]) -> tuple[list[OutputChunk], bool]:
    """The chunks of the first value, and whether they are all of it; pieces begin with piece 0."""
    value: list[OutputChunk] = []
    tensor = ""
    for chunk in chunks:
        piece = piece_of(chunk.metadata)
        if piece is None:
            return (value, False) if value else ([chunk], True)
        if value and (piece.tensor, piece.index) != (tensor, len(value)):
            return value, False
        tensor = piece.tensor
        value.append(chunk)
        if piece.index + 1 == piece.count:
            return value, piece.index + 1 == len(value)
    return value, False


def _whole_values(chunks: Iterable[OutputChunk]) -> list[ReleasedValue]:
    rest, found = list(chunks), list[ReleasedValue]()
    while rest:
        value, is_whole = _next_value(rest)
        del rest[: len(value)]
        if is_whole:
            found.append(value)
    return found
