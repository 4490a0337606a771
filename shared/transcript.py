"""The transcript: which chunks of an output count, in which order, each once.

A pure fold over one request's output records in log order. The gateway relays from it, a resumed worker
continues from it, replay checks it. Void are: a chunk of an attempt lower than the highest fence stored
before it, and a chunk whose index was taken already (a duplicate). A chunk that is early (its
predecessor was resent later) is held until the gap closes.

Where several nodes of a model speak, perhaps on several ranks at a time, each writes a track of its own, with
its own indices; the tracks' chunks follow one another as the log has them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shared.events import OutputChunk, OutputFence, OutputTotals

_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Track:
    """The valid chunks of one writer so far.

    Attributes:
        next_index: the index the next valid chunk must have.
        held: early chunks, by index.
    """

    next_index: int = 0
    held: dict[int, OutputChunk] = field(default_factory=dict)
    _hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def fold(self, chunk: OutputChunk) -> list[OutputChunk]:
        """Take one chunk; return those that became valid by it, in order."""
        if chunk.index < self.next_index:
            return []
        self.held.setdefault(chunk.index, chunk)
        valid: list[OutputChunk] = []
        while self.held and (found := self.held.pop(self.next_index, None)) is not None:
            self.next_index += 1
            self._hash.update(chunk_bytes(found))
            valid.append(found)
        return valid

    @property
    def totals(self) -> OutputTotals:
        return OutputTotals(chunks=self.next_index, digest=self._hash.hexdigest())


@dataclass(slots=True)
class Transcript:
    """The valid chunks of one output so far.

    Attributes:
        attempt: the highest attempt fenced for; lower ones are void from here on.
        tracks: by name; the one without a name is always there.
    """

    attempt: int = 0
    tracks: dict[str, Track] = field(default_factory=lambda: {"": Track()})

    def track(self, name: str) -> Track:
        """One writer's part; a new one is empty."""
        return self.tracks.setdefault(name, Track())

    def fold(self, event: OutputChunk | OutputFence) -> list[OutputChunk]:
        """Take one record; return the chunks that became valid by it, in order."""
        if isinstance(event, OutputFence):
            if event.attempt > self.attempt:
                self.attempt = event.attempt
                for track in self.tracks.values():
                    track.held.clear()  # what was early belongs to an attempt that is now void
            return []
        return [] if event.attempt < self.attempt else self.track(event.track).fold(event)

    @property
    def next_index(self) -> int:
        """The index the next valid chunk of the track without a name must have."""
        return self.tracks[""].next_index

    @property
    def totals(self) -> OutputTotals:
        """What all tracks together amount to."""
        return combined({name: track.totals for name, track in self.tracks.items()})


def combined(tracks: Mapping[str, OutputTotals]) -> OutputTotals:
    """What several tracks amount to: of the one without a name alone, just its own totals."""
    written = {name: totals for name, totals in tracks.items() if totals.chunks}
    if not written.keys() - {""}:
        return tracks.get("", OutputTotals())
    parts = sorted((name, totals.chunks, totals.digest) for name, totals in written.items())
    digest = hashlib.blake2b(_ENCODER.encode(parts), digest_size=16).hexdigest()
    return OutputTotals(chunks=sum(totals.chunks for totals in written.values()), digest=digest)


def chunk_bytes(chunk: OutputChunk) -> bytes:
    """What of a chunk is digested: whose it is and all a client can see of it. A MessagePack list."""
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
    # Outputs without log probabilities, and so all recorded before there were any, are digested as ever.
    return _ENCODER.encode(seen if chunk.logprobs is None else (*seen, chunk.logprobs))
