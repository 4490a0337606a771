"""The transcript: which chunks of an output count, in which order, each once.

A pure fold over one request's output records in log order. The gateway relays from it, a resumed worker
continues from it, replay checks it. Void are: a chunk of an attempt lower than the highest fence stored
before it, and a chunk whose index was taken already (a duplicate). A chunk that is early (its
predecessor was resent later) is held until the gap closes.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shared.events import OutputChunk, OutputFence, OutputTotals

_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Transcript:
    """The valid chunks of one output so far.

    Attributes:
        attempt: the highest attempt fenced for; lower ones are void from here on.
        next_index: the index the next valid chunk must have.
        held: early chunks, by index.
    """

    attempt: int = 0
    next_index: int = 0
    held: dict[int, OutputChunk] = field(default_factory=dict)
    _hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def fold(self, event: OutputChunk | OutputFence) -> list[OutputChunk]:
        """Take one record; return the chunks that became valid by it, in order."""
        if isinstance(event, OutputFence):
            if event.attempt > self.attempt:
                self.attempt = event.attempt
                self.held.clear()  # what was early belongs to an attempt that is now void
            return []
        if event.attempt < self.attempt or event.index < self.next_index:
            return []
        self.held.setdefault(event.index, event)
        valid: list[OutputChunk] = []
        while self.held and (chunk := self.held.pop(self.next_index, None)) is not None:
            self.next_index += 1
            self._hash.update(chunk_bytes(chunk))
            valid.append(chunk)
        return valid

    @property
    def totals(self) -> OutputTotals:
        return OutputTotals(chunks=self.next_index, digest=self._hash.hexdigest())


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
