"""`/generate`'s answers: one JSON object per line, or one document.

    {"modality": "text", "data": <base64>, "metadata": {"index": 0, "token_ids": [...]}}

The last line of a complete answer has no data; its metadata has `finish_reason` and `usage`. An answer
that fails in the middle ends with the modality `error`, its metadata has `status`, `code` and `message`.
"""

from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.errors import HttpError
from gateway.openai_answers import usage_of
from gateway.relay import Answered
from shared.events import OutputChunk


@dataclass(slots=True)
class ChunkLines:
    """An answer as NDJSON, line by line."""

    media_type: str = "application/x-ndjson"

    def chunk(self, chunk: OutputChunk) -> bytes:
        metadata = {"index": chunk.index, "token_ids": chunk.token_ids, **chunk.metadata}
        return _line(chunk.modality, _data_of(chunk), metadata)

    def answered(self, end: Answered) -> bytes:
        return _line("text", b"", _end_of(end))

    def failed(self, error: HttpError) -> bytes:
        metadata = {"status": error.status, "code": error.code, "message": error.message}
        return _line("error", b"", metadata)


@dataclass(slots=True)
class Document:
    """An answer as one JSON document: all text in one entry, everything else chunk by chunk."""

    request_id: str
    media_type: str = "application/json"
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _others: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def chunk(self, chunk: OutputChunk) -> bytes:
        if chunk.modality == "text":
            self._texts.append(chunk.text)
            self._token_ids += chunk.token_ids
        else:
            self._others.setdefault(chunk.modality, []).append(_entry(_data_of(chunk), chunk.metadata))
        return b""

    def answered(self, end: Answered) -> bytes:
        metadata = {"token_ids": self._token_ids, **_end_of(end)}
        text = _entry("".join(self._texts).encode(), metadata)
        return msgspec.json.encode(
            {"request_id": self.request_id, "outputs": {"text": [text], **self._others}}
        )

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document has not begun before it is complete")


def _data_of(chunk: OutputChunk) -> bytes:
    return chunk.text.encode() if chunk.modality == "text" else chunk.data or b""


def _end_of(end: Answered) -> dict[str, Any]:
    return {"finish_reason": end.finish_reason, "usage": usage_of(end.usage)}


def _entry(data: bytes, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"data": b64encode(data).decode(), "metadata": metadata}


def _line(modality: str, data: bytes, metadata: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"modality": modality, **_entry(data, metadata)}) + b"\n"
