"""The answer to one request, folded from its records: pieces, end, times.

Times are the log's, so answers of two deployments, or of different days, can be compared.
"""

import hashlib
from dataclasses import dataclass, field

import msgspec

from shared.epoch_fence import EpochFence
from shared.events import (
    AnyEvent,
    Failure,
    OutputChunk,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    Usage,
)
from shared.request_output import RequestOutput
from shared.subjects import Address


class StoredChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A valid chunk of an answer, and the log position at which it became valid."""

    seq: int
    chunk: OutputChunk


@dataclass(slots=True)
class Reply:
    """The answer to one request so far.

    Attributes:
        submitted_ns: time at which the submission was stored; 0 before. `first_ns` is that of the first
        chunk,
            `end_ns` that of the end.
        outcome: `open`, `finished`, `failed`, `rejected` or `cancelled`.
        chunks: the valid chunks, in order.
        failure: the error of a failed or rejected request.
    """

    submitted_ns: int = 0
    first_ns: int | None = None
    end_ns: int | None = None
    outcome: str = "open"
    chunks: list[StoredChunk] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: Usage | None = None
    failure: Failure | None = None
    _output: RequestOutput = field(default_factory=RequestOutput)
    _fence: EpochFence = field(default_factory=EpochFence)

    def take(self, address: Address, event: AnyEvent, seq: int, time_ns: int) -> None:
        """Fold one event of the request, or an epoch."""
        if not self._fence.admits(event) or self.outcome != "open":
            return
        for chunk in self._output.fold(address, event):
            if self.first_ns is None and not chunk.is_echo:
                self.first_ns = time_ns
            self.chunks.append(StoredChunk(seq=seq, chunk=chunk))
        match event:
            case RequestSubmitted():
                self.submitted_ns = self.submitted_ns or time_ns
            case RequestFinished():
                self.outcome, self.end_ns = "finished", time_ns
                self.finish_reasons, self.usage = event.finish_reasons, event.usage
            case RequestFailed() | RequestRejected():
                self.outcome = "failed" if isinstance(event, RequestFailed) else "rejected"
                self.failure, self.end_ns = event.failure, time_ns
            case RequestCancelled():
                self.outcome, self.end_ns = "cancelled", time_ns
            case _:
                pass

    # ---- contents ----------------------------------------------------------------------------------
    @property
    def text(self) -> str:
        return "".join(one.chunk.text for one in self.chunks if not one.chunk.is_echo)

    @property
    def token_ids(self) -> list[int]:
        return [token for one in self.chunks for token in one.chunk.token_ids]

    @property
    def data_bytes(self) -> int:
        """The length of its sound or images."""
        return sum(len(one.chunk.data) for one in self.chunks if one.chunk.data is not None)

    @property
    def data_digest(self) -> str | None:
        """The digest of all its sound or images; None if there are none."""
        if not self.data_bytes:
            return None
        total = hashlib.blake2b(digest_size=16)
        for one in self.chunks:
            total.update(one.chunk.data or b"")
        return total.hexdigest()

    # ---- how long it took --------------------------------------------------------------------------
    @property
    def first_s(self) -> float | None:
        """Seconds from the submission to the first chunk."""
        return None if self.first_ns is None else (self.first_ns - self.submitted_ns) / 1e9

    @property
    def whole_s(self) -> float | None:
        """Seconds from the submission to the end."""
        return None if self.end_ns is None else (self.end_ns - self.submitted_ns) / 1e9

    def plain(self) -> dict[str, object]:
        """The answer as JSON values."""
        usage = self.usage
        return {
            "outcome": self.outcome,
            "finish_reasons": self.finish_reasons,
            "failure": None if self.failure is None else msgspec.to_builtins(self.failure),
            "text": self.text,
            "token_ids": self.token_ids,
            "data_bytes": self.data_bytes,
            "data_digest": self.data_digest,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "first_s": self.first_s,
            "whole_s": self.whole_s,
        }
