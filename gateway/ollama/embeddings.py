"""`POST /api/embed`: Ollama's form of the embeddings that `/v1/embeddings` makes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.errors import NotSupportedError
from gateway.http.bodies import check_known, converted
from gateway.http.lines import json_line
from gateway.ollama.request import options_of
from gateway.requests.parsed_request import DeliveryFields
from gateway.requests.response import DocumentFormat
from gateway.texts.encodings import encode
from gateway.texts.rows import Outputs
from shared.events import OutputChunk, Usage

_PASSED_ON: Final = ("input", "truncate", "dimensions", "request_id", "timeout_s", "linger_s", "priority")


class EmbedBody(DeliveryFields, frozen=True, kw_only=True):
    """`POST /api/embed`. A text that is too long is cut off, unless `truncate` is false."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


def parse_embed(body: dict[str, Any]) -> tuple[EmbedBody, dict[str, Any]]:
    """Return a request, and the body of `/v1/embeddings` that asks the same.

    Raises:
        InvalidParamError: a field is of the wrong type, missing, or not supported.
    """
    for name, value in body.items():
        if value is not None:
            check_known(name, EmbedBody.__struct_fields__, what="no field of this route")
    asked = converted(body, EmbedBody)
    for name, value in options_of(asked.options or {}).items():
        raise NotSupportedError(f"options.{name}", value, "nothing")
    fields = {name: getattr(asked, name) for name in _PASSED_ON}
    fields["truncate"] = True if asked.truncate is None else asked.truncate
    return asked, {name: value for name, value in fields.items() if value is not None}


@dataclass(slots=True)
class EmbedDocument(DocumentFormat):
    """All embeddings in one document; durations are in nanoseconds."""

    model: str
    outputs: Outputs
    begun_s: float = field(default_factory=time.perf_counter)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self.outputs.push(choice, chunk)
        return b""

    def complete(self, usage: Usage) -> Iterator[bytes]:
        return self._pieces(self.outputs.embeddings(), usage)

    def _pieces(self, embeddings: Any, usage: Usage) -> Iterator[bytes]:
        """The document, one embedding at a time: a large one is encoded as its client reads it."""
        yield b'{"model":' + json_line(self.model) + b',"embeddings":['
        for index, embedding in enumerate(embeddings):
            yield b"," if index else b""
            yield msgspec.json.encode(encode(embedding, "float", None))
        took_ns = int((time.perf_counter() - self.begun_s) * 1e9)
        rest = {"total_duration": took_ns, "load_duration": 0, "prompt_eval_count": usage.prompt_tokens}
        yield b"]," + json_line(rest)[1:]
