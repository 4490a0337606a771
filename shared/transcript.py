"""The transcript: the chunks of one request's writers, in order, each once, and their digest.

It is a pure fold over the chunks and fences that `shared.request_output` accepts, in log order. Two kinds of
chunks are void: chunks of an attempt lower than the highest `output.fence` stored before them, and duplicates
of an index. Advisory chunks are no part of it. An out-of-order chunk (its predecessor was resent later) is
held until the gap closes.

If several nodes of a model emit output, perhaps on several ranks concurrently, each writes its own track with
its own indices. The chunks of different tracks are ordered as in the log.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shared.events import OutputChunk, OutputFence, OutputTotals

FORM: Final = 1
"""The form of the digest in new totals (`OutputTotals.form`). Totals of older logs have form 0."""
_ENCODER: Final = msgspec.msgpack.Encoder()
_ORDERED: Final = msgspec.msgpack.Encoder(order="deterministic")


@dataclass(slots=True)
class Track:
    """The valid chunks of one writer so far.

    Attributes:
        next_index: the index of the next valid chunk.
        held: out-of-order chunks, by index.
    """

    next_index: int = 0
    held: dict[int, OutputChunk] = field(default_factory=dict)
    _hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    _old_hash: hashlib.blake2b | None = None  # of form 0, from the first chunk on for which it differs

    def fold(self, chunk: OutputChunk) -> list[OutputChunk]:
        """Fold one chunk; return the chunks that became valid, in order."""
        if chunk.index < self.next_index:
            return []
        self.held.setdefault(chunk.index, chunk)
        valid: list[OutputChunk] = []
        while self.held and (found := self.held.pop(self.next_index, None)) is not None:
            self.next_index += 1
            self._digest(found)
            valid.append(found)
        return valid

    @property
    def totals(self) -> OutputTotals:
        return self.totals_of(FORM)

    def totals_of(self, form: int) -> OutputTotals:
        """The totals with a digest of this form."""
        digest = self._hash if form or self._old_hash is None else self._old_hash
        return OutputTotals(chunks=self.next_index, digest=digest.hexdigest(), form=form)

    def _digest(self, chunk: OutputChunk) -> None:
        if chunk.metadata and self._old_hash is None:
            self._old_hash = self._hash.copy()
        self._hash.update(chunk_bytes(chunk))
        if self._old_hash is not None:
            self._old_hash.update(chunk_bytes(chunk, form=0))


@dataclass(slots=True)
class Transcript:
    """The valid chunks of one output so far.

    Attributes:
        attempt: the highest attempt of a fence; chunks of lower attempts are void from here on.
        tracks: by name; the unnamed track always exists.
    """

    attempt: int = 0
    tracks: dict[str, Track] = field(default_factory=lambda: {"": Track()})

    def track(self, name: str) -> Track:
        """Return the track `name`, which is new and empty if it does not exist."""
        return self.tracks.setdefault(name, Track())

    def fold(self, event: OutputChunk | OutputFence) -> list[OutputChunk]:
        """Fold one record; return the chunks that became valid, in order."""
        if isinstance(event, OutputFence):
            self.begin(event.attempt)
            return []
        is_void = event.attempt < self.attempt or event.advisory
        return [] if is_void else self.track(event.track).fold(event)

    def begin(self, attempt: int) -> None:
        """Void the chunks of lower attempts from here on."""
        if attempt > self.attempt:
            self.attempt = attempt
            for track in self.tracks.values():
                track.held.clear()  # held chunks belong to an attempt that is now void

    @property
    def next_index(self) -> int:
        """The index of the next valid chunk of the unnamed track."""
        return self.tracks[""].next_index

    @property
    def totals(self) -> OutputTotals:
        """The totals of all tracks together."""
        return self.totals_of(FORM)

    def totals_of(self, form: int) -> OutputTotals:
        """The totals of all tracks together, with a digest of this form."""
        return combined({name: track.totals_of(form) for name, track in self.tracks.items()})

    def matches(self, reported: OutputTotals) -> bool:
        """Tell whether this is the reported output. The digest of an output without chunks is ignored."""
        found = self.totals_of(reported.form)
        return reported == found or (reported.chunks == found.chunks == 0)


def combined(tracks: Mapping[str, OutputTotals]) -> OutputTotals:
    """Return the totals of several tracks. The unnamed track alone keeps its own totals."""
    written = {name: totals for name, totals in tracks.items() if totals.chunks}
    if not written.keys() - {""}:
        return tracks.get("", OutputTotals())
    parts = sorted((name, totals.chunks, totals.digest) for name, totals in written.items())
    digest = hashlib.blake2b(_ENCODER.encode(parts), digest_size=16).hexdigest()
    chunks = sum(totals.chunks for totals in written.values())
    return OutputTotals(chunks=chunks, digest=digest, form=min(totals.form for totals in written.values()))


def chunk_bytes(chunk: OutputChunk, form: int = FORM) -> bytes:
    """Return the digested part of a chunk: its attempt and everything a client sees. A MessagePack list."""
    seen: tuple[object, ...] = (
        chunk.attempt,
        chunk.choice,
        chunk.modality,
        chunk.text_offset,
        chunk.token_offset,
        chunk.token_ids,
        chunk.text,
        chunk.data,
    )
    # Without log probabilities and metadata the digest is the same as before events had them.
    if chunk.metadata and form:
        return _ORDERED.encode((*seen, chunk.logprobs, chunk.metadata))
    return _ENCODER.encode(seen if chunk.logprobs is None else (*seen, chunk.logprobs))
