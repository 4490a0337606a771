"""`POST /v1/embeddings`: OpenAI's request and answer, with images and further encodings.

A model that takes several texts gets all of them in one request. Another one, such as a decoder, gets a
separate request for each, like each of several choices (`gateway.requests.choices`). The checkpoint defines
how an embedding is computed; the gateway encodes its numbers (`gateway.texts.encodings`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from gateway.errors import InvalidParamError
from gateway.http.bodies import body_schema, converted, read_object
from gateway.http.lines import json_line
from gateway.media.intake import MediaIntake
from gateway.requests.response import AnswerFormat, AnswerResponse, DocumentFormat, RequestGroup
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.texts.batches import batches_of
from gateway.texts.encodings import Encoding, Ranges, check_ranges, encode
from gateway.texts.entries import Entry, EntryReader
from gateway.texts.fields import TextsRequest, prepared
from gateway.texts.rows import Outputs
from gateway.texts.submission import request_group, single_texts
from models.base import EMBEDDING
from shared.errors import ClientError
from shared.events import OutputChunk, Usage
from shared.validation_errors import described

EMBEDDINGS: Final = "/v1/embeddings"
_ID_PREFIX: Final = "embd"
_ALIASES: Final = {
    "embedding_type": "encoding_format",
    "embedding_types": "encoding_format",
    "output_dtype": "encoding_format",
    "output_dimension": "dimensions",
}
"""Names of Jina, Cohere and Voyage."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "late_chunking": (False,),
}


class NoEmbeddingsError(ClientError):
    """The model makes no embeddings."""

    code = "unsupported_modality"
    param = "model"

    def __init__(self, name: str, outputs: Sequence[str]) -> None:
        super().__init__(f"the model {name!r} makes no embeddings: its outputs are {', '.join(outputs)}")


class EmbeddingRequest(TextsRequest, frozen=True, kw_only=True):
    """Texts, token ids or images, and the encoding of their embeddings.

    Attributes:
        dimensions: the number of leading dimensions to keep; None is all.
        quantization_ranges: the smallest and the largest number of each dimension, for int8 and uint8.
    """

    model: Annotated[str, Meta(max_length=256)]
    input: Any
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    quantization_ranges: list[list[float]] | None = None


@dataclass(slots=True)
class EmbeddingDocument(DocumentFormat):
    """The answer with all embeddings."""

    model: str
    encoding: Encoding
    ranges: Ranges | None
    outputs: Outputs

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self.outputs.push(choice, chunk)
        return b""

    def complete(self, usage: Usage) -> Iterator[bytes]:
        embeddings = self.outputs.embeddings()
        encode(embeddings[0], self.encoding, self.ranges)  # an error has a status of its own only now
        return self._pieces(embeddings, usage)

    def _pieces(self, embeddings: Sequence[Any], usage: Usage) -> Iterator[bytes]:
        """The document, one embedding at a time: a large one is encoded as its client reads it."""
        yield b'{"object":"list","data":['
        for index, embedding in enumerate(embeddings):
            found = encode(embedding, self.encoding, self.ranges)
            yield b"," if index else b""
            yield msgspec.json.encode({"object": "embedding", "index": index, "embedding": found})
        used = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}
        yield b'],"model":' + json_line(self.model) + b',"usage":' + json_line(used) + b"}"


def embedding_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["texts"])
    intake = MediaIntake(gateway)
    served = gateway.served

    @router.post(
        EMBEDDINGS, summary="Make embeddings of texts and images", openapi_extra=body_schema(EmbeddingRequest)
    )
    async def embeddings(request: Request) -> Response:
        def make_document(body: EmbeddingRequest, outputs: Outputs) -> AnswerFormat:
            encoding = body.encoding_format or "float"
            ranges = check_ranges(body.quantization_ranges, encoding)
            return EmbeddingDocument(body.model or served.name, encoding, ranges, outputs)

        return await embedded(gateway, intake, request, await read_object(request), make_document)

    return router


MakeDocument: TypeAlias = Callable[[EmbeddingRequest, Outputs], AnswerFormat]
"""Makes the document with the embeddings of a request."""


async def embedded(
    gateway: Gateway,
    intake: MediaIntake,
    request: Request,
    fields: dict[str, Any],
    make_document: MakeDocument,
    route: str = EMBEDDINGS,
) -> AnswerResponse:
    """Return the response to a body of this route; the document may be another API's.

    Raises:
        ClientError: the body is wrong, or the model makes no embeddings.
    """
    body = _parsed(fields, gateway)
    check_ranges(body.quantization_ranges, body.encoding_format or "float")
    reader = EntryReader(
        name="input",
        check_modality=intake.check_modality,
        most=gateway.settings.max_embeddings,
        setting="gateway.max_embeddings",
    )
    group, orders = await _group(gateway, intake, request, body, reader.read(body.input))
    group = replace(group, route=route)

    def make_format(_: SubmissionRecord) -> AnswerFormat:
        return make_document(body, Outputs(EMBEDDING, orders))

    return AnswerResponse(gateway, group, make_format)


def _parsed(fields: dict[str, Any], gateway: Gateway) -> EmbeddingRequest:
    types = fields.get("embedding_types")
    if isinstance(types, list):
        if len(types) != 1:
            raise InvalidParamError(
                "embedding_types",
                f"embedding_types: expected one encoding in a request, found {described(types)}",
            )
        fields = {**fields, "embedding_types": types[0]}
    family = gateway.served.options
    fields = prepared(fields, EmbeddingRequest, family, aliases=_ALIASES, neutral=_NEUTRAL)
    body = converted(fields, EmbeddingRequest)
    gateway.served.check_model(body.model)
    if EMBEDDING not in gateway.served.outputs:
        raise NoEmbeddingsError(gateway.served.name, gateway.served.outputs)
    return body


async def _group(
    gateway: Gateway, intake: MediaIntake, http: Request, body: EmbeddingRequest, entries: Sequence[Entry]
) -> tuple[RequestGroup, list[list[int]]]:
    """The requests on the log, and the entries to which the rows of their outputs belong."""
    if gateway.served.takes_texts:
        batches = batches_of(entries)
        group = await request_group(
            gateway, intake, http, body, batches, modality=EMBEDDING, route=EMBEDDINGS, id_prefix=_ID_PREFIX
        )
        return group, [batch.order for batch in batches]
    for entry in entries:
        if entry.image is not None:
            raise InvalidParamError(
                entry.image.where,
                f"{entry.image.where}: the model {gateway.served.name!r} makes embeddings of texts only",
                code="unsupported_modality",
            )
    group = single_texts(
        gateway, http, body, entries, modality=EMBEDDING, route=EMBEDDINGS, id_prefix=_ID_PREFIX
    )
    return group, [[index] for index in range(len(entries))]
