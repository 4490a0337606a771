"""The answers of `/generate`: one JSON object per line (NDJSON), or one document.

    {"modality": "text", "data": <base64>, "metadata": {"index": 0, "token_ids": [...]}}

The last line of a complete answer has no data; its metadata has `finish_reason`, `usage` and `durability`
(the failures that the answer's events survive). An answer that fails midway ends with the modality `error`,
whose metadata has `status`, `code` and `message`. A resumed stream begins after the `index` that its client
has. There is one choice.

A large tensor is in the log in pieces (`shared.output_pieces`). A file, such as an image, is one line. Lines
have the pieces of other tensors as they are, or with a `tensor_format` one file for each; with the format
`raw` they have the pieces of files as well. A document has whole tensors only. Values wait in a spool, which
they leave at the client's speed. Advisory chunks are lines whose metadata has `advisory`.
"""

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.errors import HttpError
from gateway.generate.tensor_files import TensorFormat
from gateway.generate.values import OutputValue, ValueAssembler
from gateway.http.lines import json_line
from gateway.requests.response import Body, DocumentFormat
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
    tensor_format: TensorFormat = "raw"
    joins_files: bool = True
    _finish_reason: str = ""
    _values: ValueAssembler = field(init=False)

    def __post_init__(self) -> None:
        self._values = ValueAssembler(self.tensor_format)

    def chunk(self, choice: int, chunk: OutputChunk) -> Body:
        is_file = self.joins_files and "content_type" in chunk.metadata
        if chunk.modality != "text" and (is_file or self.tensor_format != "raw"):
            return self._whole(choice, chunk)
        if self.position.has(choice, chunk.index):
            return b""
        metadata = {"index": chunk.index, "token_ids": chunk.token_ids, **_logprobs(chunk), **chunk.metadata}
        return _line(chunk.modality, _data_of(chunk), metadata)

    def advice(self, choice: int, chunk: OutputChunk) -> bytes:
        if self.position.has(choice, chunk.index + 1):
            return b""
        metadata = {**chunk.metadata, "index": chunk.index, "advisory": True}
        return _line(chunk.modality, _data_of(chunk), metadata)

    def _whole(self, choice: int, chunk: OutputChunk) -> Body:
        """The line of the value that a chunk completes; it has the index of its last chunk."""
        value = self._values.push(chunk)
        if value is None:
            return b""
        if self.position.has(choice, chunk.index):
            self._values.forget_sent()
            return b""
        return self._line_of(value, chunk.index)

    def _line_of(self, value: OutputValue, index: int) -> Iterator[bytes]:
        metadata = {"index": index, "token_ids": [], **value.metadata}
        yield b'{"modality":' + json_line(value.modality) + b","
        yield from _streamed_entry(self._values.base64(value), metadata)
        yield b"}\n"
        self._values.forget_sent()

    def close(self) -> None:
        self._values.close()

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
    """An answer as one JSON document: all text in one entry, other modalities with one entry per value.

    The metadata of the end is in the text's entry, or without text in the last entry of all.
    """

    request_id: str
    durability: Durability
    tensor_format: TensorFormat = "raw"
    _finish_reason: str = ""
    _texts: list[str] = field(default_factory=list)
    _tokens: dict[str, list[Any]] = field(default_factory=lambda: {"token_ids": []})
    _others: dict[str, list[OutputValue]] = field(default_factory=dict)
    _values: ValueAssembler = field(init=False)

    def __post_init__(self) -> None:
        self._values = ValueAssembler(self.tensor_format)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality == "text":
            self._texts.append(chunk.text)
            self._add_tokens(chunk)
        elif (value := self._values.push(chunk)) is not None:
            self._others.setdefault(value.modality, []).append(value)
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        self._finish_reason = finish_reason
        return b""

    def complete(self, usage: Usage) -> Iterator[bytes]:
        end = _end_of(self._finish_reason, usage, self.durability)
        yield b'{"request_id":' + msgspec.json.encode(self.request_id) + b',"outputs":{'
        separator = b""
        if self._texts or not self._others:
            text = _entry("".join(self._texts).encode(), {**self._tokens, **end})
            yield b'"text":[' + msgspec.json.encode(text) + b"]"
            separator = b","
        elif self._others:
            *_, last = self._others.values()
            last[-1].metadata.update(end)
        for modality, values in self._others.items():
            yield separator + msgspec.json.encode(modality) + b":["
            for number, value in enumerate(values):
                yield b",{" if number else b"{"
                yield from _streamed_entry(self._values.base64(value), value.metadata)
                yield b"}"
            yield b"]"
            separator = b","
        yield b"}}"

    def close(self) -> None:
        self._values.close()

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
    if usage.cached_tokens and not usage.completion_tokens:  # a prompt that was computed in advance
        used["cached_tokens"] = usage.cached_tokens
    return {"finish_reason": finish_reason, "usage": used, "durability": durability}


def _entry(data: bytes, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"data": b64encode(data).decode(), "metadata": metadata}


def _streamed_entry(base64: Iterator[bytes], metadata: dict[str, Any]) -> Iterator[bytes]:
    """The fields of an entry whose data arrive in pieces."""
    yield b'"data":"'
    yield from base64
    yield b'","metadata":' + json_line(metadata)


def _line(modality: str, data: bytes, metadata: dict[str, Any]) -> bytes:
    return json_line({"modality": modality, **_entry(data, metadata)}) + b"\n"
