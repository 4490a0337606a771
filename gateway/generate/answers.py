"""`/generate`'s answers: one JSON object per line, or one document.

    {"modality": "text", "data": <base64>, "metadata": {"index": 0, "token_ids": [...]}}

The last line of a complete answer has no data; its metadata has `finish_reason`, `usage`, and what the events
of the answer survive (`durability`). An answer that fails in the middle ends with the modality `error`, its
metadata has `status`, `code` and `message`.
A stream that is resumed begins behind the `index` its client has. There is one choice.
"""

from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.errors import HttpError
from gateway.openai.answers import usage_of
from gateway.requests.resume import Position
from shared.events import OutputChunk, Usage
from shared.log.port import Durability


@dataclass(slots=True)
class ChunkLines:
    """An answer as NDJSON, line by line."""

    durability: Durability
    position: Position = field(default_factory=lambda: Position.start(1))
    media_type: str = "application/x-ndjson"
    _finish_reason: str = ""

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if self.position.has(choice, chunk.index):
            return b""
        metadata = {"index": chunk.index, "token_ids": chunk.token_ids, **_logprobs(chunk), **chunk.metadata}
        return _line(chunk.modality, _data_of(chunk), metadata)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        self._finish_reason = finish_reason
        return b""

    def complete(self, usage: Usage) -> bytes:
        return _line("text", b"", _end_of(self._finish_reason, usage, self.durability))

    def failed(self, error: HttpError) -> bytes:
        metadata = {"status": error.status, "code": error.code, "message": error.message}
        return _line("error", b"", metadata)


@dataclass(slots=True)
class Document:
    """An answer as one JSON document: all text in one entry, everything else chunk by chunk.

    How it ended stands with the text, or, where none was put out, with the last entry of all.
    """

    request_id: str
    durability: Durability
    media_type: str = "application/json"
    _finish_reason: str = ""
    _texts: list[str] = field(default_factory=list)
    _told: dict[str, list[Any]] = field(default_factory=lambda: {"token_ids": []})
    _others: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality == "text":
            self._texts.append(chunk.text)
            self._tell(chunk)
        else:
            self._others.setdefault(chunk.modality, []).append(_entry(_data_of(chunk), chunk.metadata))
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        self._finish_reason = finish_reason
        return b""

    def complete(self, usage: Usage) -> bytes:
        end = _end_of(self._finish_reason, usage, self.durability)
        outputs = self._others
        if self._texts or not outputs:
            text = _entry("".join(self._texts).encode(), {**self._told, **end})
            outputs = {"text": [text], **outputs}
        else:
            *_, last = outputs.values()
            last[-1]["metadata"] = {**last[-1]["metadata"], **end}
        return msgspec.json.encode({"request_id": self.request_id, "outputs": outputs})

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document has not begun before it is complete")

    def _tell(self, chunk: OutputChunk) -> None:
        """Gather what a chunk tells of its tokens; those of an echo are the prompt's."""
        told = {"token_ids": chunk.token_ids, **_logprobs(chunk), **chunk.metadata}
        for name in ("token_ids", "logprobs"):
            if name in told:
                self._told.setdefault(f"prompt_{name}" if chunk.is_echo else name, []).extend(told[name])


def _logprobs(chunk: OutputChunk) -> dict[str, Any]:
    return {} if chunk.logprobs is None else {"logprobs": chunk.logprobs}


def _data_of(chunk: OutputChunk) -> bytes:
    return chunk.text.encode() if chunk.modality == "text" else chunk.data or b""


def _end_of(finish_reason: str, usage: Usage, durability: Durability) -> dict[str, Any]:
    told = usage_of(usage)
    if usage.cached_tokens:
        told["cached_tokens"] = usage.cached_tokens
    return {"finish_reason": finish_reason, "usage": told, "durability": durability}


def _entry(data: bytes, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"data": b64encode(data).decode(), "metadata": metadata}


def _line(modality: str, data: bytes, metadata: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"modality": modality, **_entry(data, metadata)}) + b"\n"
