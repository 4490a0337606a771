"""`POST /v1/embeddings`: OpenAI's request, and its answer.

Each input is a request of its own on the log, as each answer of several is (`gateway.requests.choices`).
What makes an embedding of it, the checkpoint says (`models.text.embedding`); what arrives here are its bytes.
"""

import struct
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway import errors, request_limits
from gateway.client_key import key_name
from gateway.errors import HttpError, InvalidParamError
from gateway.http.bodies import body_schema, params_of, read_object
from gateway.requests.choices import split
from gateway.requests.response import Answer, Format, Question
from gateway.requests.service import Gateway
from gateway.requests.submission import Asked, Recorded, request_id_of
from models.base import EMBEDDING
from shared.errors import ClientError
from shared.events import Inputs, OutputChunk, Params, Priority, Usage
from shared.validation_errors import described, misfit

EMBEDDINGS: Final = "/v1/embeddings"


class NoEmbeddingsError(ClientError):
    """The model makes no embeddings."""

    code = "unsupported_modality"
    param = "model"

    def __init__(self, name: str, outputs: Sequence[str]) -> None:
        super().__init__(f"the model {name!r} makes no embeddings: it puts out {', '.join(outputs)}")


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, or prompts that are tokens already, and how their embeddings are told.

    `request_id`, `timeout_s`, `linger_s` and `priority` are ours; `user` is left alone.
    """

    model: Annotated[str, Meta(max_length=256)]
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    linger_s: float | None = None
    priority: Priority | None = None

    @property
    def params(self) -> Params:
        """The parameters as the log has them.

        Raises:
            InvalidParamError: a value is out of its range.
        """
        request_limits.check_timeout(self.timeout_s)
        request_limits.check_linger(self.linger_s)
        return params_of({"dimensions": self.dimensions})

    def inputs(self, settings: GatewaySettings) -> list[Inputs]:
        """What is asked, one for each embedding.

        Raises:
            InvalidParamError: it is not what it has to be, or too much.
        """
        match self.input:
            case str():
                return [_input("input", self.input)]
            case [int(), *_]:
                return [_input("input", self.input)]
            case [str(), *_] | [[*_], *_]:
                if len(self.input) > settings.max_embeddings:
                    raise InvalidParamError(
                        "input",
                        f"input: expected at most {settings.max_embeddings} texts in one request, "
                        f"found {len(self.input)}",
                    )
                return [_input(f"input[{number}]", one) for number, one in enumerate(self.input)]
            case _:
                raise InvalidParamError(
                    "input",
                    "input: expected a string, an array of token ids, or an array of either, "
                    f"found {described(self.input)}",
                )


def parse(body: dict[str, Any]) -> EmbeddingRequest:
    """The request in a JSON object.

    Raises:
        InvalidParamError: something in it is of the wrong type, or missing.
    """
    try:
        return msgspec.convert(body, EmbeddingRequest)
    except msgspec.ValidationError as error:
        raise errors.of_misfit(misfit(error, body, EmbeddingRequest)) from error


def _input(where: str, found: object) -> Inputs:
    """One text, or prompt of tokens."""
    if not found or not isinstance(found, str | list):
        raise InvalidParamError(
            "input", f"{where}: expected a text or token ids, not empty, found {described(found)}"
        )
    name = "text" if isinstance(found, str) else "token_ids"
    given = {name: found, "chat": False, "output_modalities": [EMBEDDING]}
    try:
        return msgspec.convert(given, Inputs)
    except msgspec.ValidationError as error:
        wrong = misfit(error, given, Inputs)
        raise InvalidParamError("input", f"{wrong.place.replace(name, where, 1)}: {wrong.problem}") from error


@dataclass(slots=True)
class EmbeddingDocument:
    """The answer, once all embeddings are there: numbers, or the base64 of their float32, little-endian."""

    model: str
    is_base64: bool = False
    media_type: str = "application/json"
    _found: dict[int, bytes] = field(default_factory=dict)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality == EMBEDDING:
            self._found[choice] = chunk.data or b""
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": self._told(self._found[index])}
            for index in sorted(self._found)
        ]
        used = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": self.model, "usage": used})

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document has not begun before it is complete")

    def _told(self, data: bytes) -> str | list[float]:
        if self.is_base64:
            return b64encode(data).decode()
        return list(struct.unpack(f"<{len(data) // 4}f", data))


def embedding_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(EMBEDDINGS, summary="Make embeddings of texts", openapi_extra=body_schema(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        body = parse(await read_object(request))
        gateway.served.check_model(body.model)
        if EMBEDDING not in gateway.served.outputs:
            raise NoEmbeddingsError(gateway.served.name, gateway.served.outputs)
        inputs = body.inputs(gateway.settings)
        asked = Asked(
            request_id=request_id_of(body.request_id, "embd"),
            id_is_chosen=body.request_id is not None,
            model=body.model,
            inputs=inputs[0],
            params=body.params,
            created_s=int(time.time()),
            trace=request.headers.get("traceparent"),
            timeout_s=request_limits.limit_s(body.timeout_s, gateway.settings),
            linger_s=body.linger_s or 0.0,
            priority=body.priority or 0,
            tenant=key_name(request.scope),
        )

        def form(_: Recorded) -> Format:
            return EmbeddingDocument(gateway.served.name, body.encoding_format == "base64")

        return Answer(gateway, Question(route=EMBEDDINGS, parts=split(asked, inputs, 1)), form)

    return router
