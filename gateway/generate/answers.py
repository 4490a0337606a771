"""The answers of `/generate`: one JSON object per line (NDJSON), or one document.

    {"modality": "text", "data": <base64>, "metadata": {"index": 0, "token_ids": [...]}}

The last line of a complete answer has no data; its metadata has `finish_reason`, `usage` and `durability`
(the failures that the answer's events survive). An answer that fails midway ends with the modality `error`,
whose metadata has `status`, `code` and `message`. A resumed stream begins after the `index` that its client
has. There is one choice.
"""

from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.errors import HttpError
from gateway.http.lines import json_line
from gateway.requests.response import DocumentFormat
from gateway.requests.resume import StreamPosition
from gateway.requests.usage import usage_object
from shared.events import OutputChunk, Usage
from shared.log.port import Durability


@dataclass(slots=True)
class ChunkLines:
    """An answer as NDJSON."""

    durability: Durability
    position: StreamPosition = field(default_factory=lambda: StreamPosition.start(1))
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
class JsonDocument(DocumentFormat):
    """An answer as one JSON document: all text in one entry, other modalities with one entry per chunk.

    The metadata of the end is in the text's entry, or without text in the last entry of all.
    """

    request_id: str
    durability: Durability
    _finish_reason: str = ""
    _texts: list[str] = field(default_factory=list)
    _tokens: dict[str, list[Any]] = field(default_factory=lambda: {"token_ids": []})
    _others: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality == "text":
            self._texts.append(chunk.text)
            self._add_tokens(chunk)
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
            text = _entry("".join(self._texts).encode(), {**self._tokens, **end})
            outputs = {"text": [text], **outputs}
        else:
            *_, last = outputs.values()
            last[-1]["metadata"] = {**last[-1]["metadata"], **end}
        return msgspec.json.encode({"request_id": self.request_id, "outputs": outputs})

    def _add_tokens(self, chunk: OutputChunk) -> None:
        """Add the metadata of a chunk's tokens; those of an echo are the prompt's."""
        metadata = {"token_ids": chunk.token_ids, **_logprobs(chunk), **chunk.metadata}
        for name in ("token_ids", "logprobs"):
            if name in metadata:
                self._tokens.setdefault(f"prompt_{name}" if chunk.is_echo else name, []).extend(
                    metadata[name]
                )


def _logprobs(chunk: OutputChunk) -> dict[str, Any]:
    return {} if chunk.logprobs is None else {"logprobs": chunk.logprobs}


def _data_of(chunk: OutputChunk) -> bytes:
    return chunk.text.encode() if chunk.modality == "text" else chunk.data or b""


def _end_of(finish_reason: str, usage: Usage, durability: Durability) -> dict[str, Any]:
    used = usage_object(usage)
    if usage.cached_tokens:
        used["cached_tokens"] = usage.cached_tokens
    return {"finish_reason": finish_reason, "usage": used, "durability": durability}


def _entry(data: bytes, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"data": b64encode(data).decode(), "metadata": metadata}


def _line(modality: str, data: bytes, metadata: dict[str, Any]) -> bytes:
    return json_line({"modality": modality, **_entry(data, metadata)}) + b"\n"
