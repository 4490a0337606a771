"""`POST /v1/embeddings`: OpenAI's request and answer.

Each input is a separate request on the log, like each of several choices (`gateway.requests.choices`). The
checkpoint defines how an embedding is computed (`models.text.embedding`); the gateway receives its bytes.
"""

import struct
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway.errors import InvalidParamError
from gateway.http.bodies import body_schema, converted, params_of, read_object
from gateway.openai.known_fields import check_fields
from gateway.openai.prompts import prompt_inputs, prompt_list
from gateway.requests.choices import split
from gateway.requests.parsed_request import ModelRequest, parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, DocumentFormat, RequestGroup
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from models.base import EMBEDDING
from shared.errors import ClientError
from shared.events import Inputs, OutputChunk, Params, Usage
from shared.validation_errors import described

EMBEDDINGS: Final = "/v1/embeddings"


class NoEmbeddingsError(ClientError):
    """The model makes no embeddings."""

    code = "unsupported_modality"
    param = "model"

    def __init__(self, name: str, outputs: Sequence[str]) -> None:
        super().__init__(f"the model {name!r} makes no embeddings: its outputs are {', '.join(outputs)}")


class EmbeddingRequest(ModelRequest, frozen=True, kw_only=True):
    """Texts or token ids, and the encoding of their embeddings. `user` is ignored."""

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None

    @property
    def params(self) -> Params:
        """The parameters of the request's event.

        Raises:
            InvalidParamError: a value is out of its range.
        """
        self.check_delivery()
        return params_of(self)

    def inputs(self, settings: GatewaySettings) -> list[Inputs]:
        """The inputs, one for each embedding.

        Raises:
            InvalidParamError: an input is wrong, or there are too many.
        """
        prompts = prompt_list("input", self.input)
        if len(prompts) > settings.max_embeddings:
            raise InvalidParamError(
                "input",
                f"input: expected at most {settings.max_embeddings} texts in one request, "
                f"found {len(prompts)}",
            )
        return [_input(where, prompt) for where, prompt in prompts]


def _input(where: str, found: object) -> Inputs:
    """One text, or one prompt of token ids."""
    if not found or not isinstance(found, str | list):
        raise InvalidParamError(
            "input", f"{where}: expected a text or token ids, not empty, found {described(found)}"
        )
    return prompt_inputs("input", where, found, output_modalities=[EMBEDDING])


@dataclass(slots=True)
class EmbeddingDocument(DocumentFormat):
    """The answer with all embeddings: as numbers, or as the base64 of their little-endian float32."""

    model: str
    is_base64: bool = False
    _found: dict[int, bytes] = field(default_factory=dict)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality == EMBEDDING:
            self._found[choice] = chunk.data or b""
        return b""

    def complete(self, usage: Usage) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(self._found[index])}
            for index in sorted(self._found)
        ]
        used = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": self.model, "usage": used})

    def _encoded(self, data: bytes) -> str | list[float]:
        if self.is_base64:
            return b64encode(data).decode()
        return list(struct.unpack(f"<{len(data) // 4}f", data))


def embedding_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(EMBEDDINGS, summary="Make embeddings of texts", openapi_extra=body_schema(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        fields = await read_object(request)
        check_fields(fields, EmbeddingRequest.__struct_fields__)
        body = converted(fields, EmbeddingRequest)
        gateway.served.check_model(body.model)
        if EMBEDDING not in gateway.served.outputs:
            raise NoEmbeddingsError(gateway.served.name, gateway.served.outputs)
        inputs = body.inputs(gateway.settings)
        parsed = parsed_request(
            request,
            body,
            gateway.settings,
            id_prefix="embd",
            model=body.model,
            inputs=inputs[0],
            params=body.params,
        )

        def make_format(_: SubmissionRecord) -> AnswerFormat:
            return EmbeddingDocument(gateway.served.name, body.encoding_format == "base64")

        group = RequestGroup(route=EMBEDDINGS, requests=split(parsed, inputs, 1))
        return AnswerResponse(gateway, group, make_format)

    return router
