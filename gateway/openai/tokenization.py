"""`POST /tokenize` and `POST /detokenize`, as vLLM has them.

The tokenizer is the worker's. So both are requests on the log for an echo of the prompt without an answer:
nothing is computed, and the tokens are exactly those that a model would get.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from gateway.errors import InvalidParamError
from gateway.http.bodies import body_schema, converted, read_object
from gateway.media import parts
from gateway.media.intake import MediaIntake
from gateway.openai.known_fields import check_fields
from gateway.openai.requests import ChatRequest, CompletionRequest, parse
from gateway.openai.routes import chat_group
from gateway.requests.parsed_request import DeliveryFields
from gateway.requests.response import AnswerResponse, DocumentFormat, RequestGroup
from gateway.requests.service import Gateway
from shared.events import OutputChunk, Params, Usage
from shared.validation_errors import described

TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
_PREFIX: Final = "tok"
_OF_CHATS: Final = (
    "messages", "tools", "chat_template_kwargs", "enable_thinking", "reasoning_effort",
    "continue_final_message", "add_generation_prompt",
)  # fmt: skip


class TokenizeRequest(DeliveryFields, frozen=True, kw_only=True):
    """A prompt, or a chat with what changes its prompt."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "return_token_strs": (False,),
        "chat_template": (),
    }

    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(DeliveryFields, frozen=True, kw_only=True):
    """Token ids."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"skip_special_tokens": (True,)}

    tokens: list[int]
    model: Annotated[str, Meta(max_length=256)] | None = None


@dataclass
class _Tokens(DocumentFormat):
    """The tokens of a prompt."""

    max_seq_len: int
    token_ids: list[int] = field(default_factory=list)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self.token_ids += chunk.metadata["token_ids"]
        return b""

    def complete(self, usage: Usage) -> bytes:
        count = len(self.token_ids)
        return msgspec.json.encode(
            {"count": count, "max_model_len": self.max_seq_len, "tokens": self.token_ids, "token_strs": None}
        )


@dataclass
class _Text(DocumentFormat):
    """The text of token ids."""

    texts: list[str] = field(default_factory=list)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self.texts.append(chunk.text)
        return b""

    def complete(self, usage: Usage) -> bytes:
        return msgspec.json.encode({"prompt": "".join(self.texts)})


def tokenization_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["texts"])
    intake = MediaIntake(gateway)
    served = gateway.served

    @router.post(TOKENIZE, summary="Tokens of a prompt", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        fields = await read_object(request)
        check_fields(fields, TokenizeRequest.__struct_fields__, TokenizeRequest.neutral)
        group = await _group(gateway, intake, request, converted(fields, TokenizeRequest))
        group = replace(as_echo(group), route=TOKENIZE)
        return AnswerResponse(gateway, group, lambda _: _Tokens(served.max_seq_len))

    @router.post(DETOKENIZE, summary="Text of token ids", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        fields = await read_object(request)
        check_fields(fields, DetokenizeRequest.__struct_fields__, DetokenizeRequest.neutral)
        asked = converted(fields, DetokenizeRequest)
        if not asked.tokens:
            return Response(msgspec.json.encode({"prompt": ""}), media_type="application/json")
        body = _delivery(asked) | {"model": asked.model or served.name, "prompt": asked.tokens}
        try:
            parsed = parse(CompletionRequest, body, served.options)
            group, _ = chat_group(gateway, parsed, request, DETOKENIZE, _PREFIX)
        except InvalidParamError as error:
            raise _in_own_words(error) from error
        return AnswerResponse(gateway, as_echo(group), lambda _: _Text())

    return router


def as_echo(group: RequestGroup) -> RequestGroup:
    """The requests of a group, for the prompt alone."""
    params = Params(echo=True, max_tokens=0)
    return replace(group, requests=[replace(one, params=params) for one in group.requests], is_stream=False)


async def _group(
    gateway: Gateway, intake: MediaIntake, request: Request, asked: TokenizeRequest
) -> RequestGroup:
    fields = _delivery(asked) | {"model": asked.model or gateway.served.name}
    if (asked.prompt is None) == (asked.messages is None):
        found = "neither" if asked.prompt is None else "both"
        raise InvalidParamError("prompt", f"prompt: expected it, or messages; found {found}")
    if asked.prompt is not None:
        given = [name for name in _OF_CHATS if getattr(asked, name) is not None]
        if given:
            raise InvalidParamError(given[0], f"{given[0]}: expected none beside a prompt, found one")
        _check_special(asked, default=True)
        body = parse(CompletionRequest, fields | {"prompt": asked.prompt}, gateway.served.options)
        return chat_group(gateway, body, request, TOKENIZE, _PREFIX)[0]
    _check_special(asked, default=False)
    placed = parts.place(asked.messages, check_modality=intake.check_modality)
    fields |= {name: getattr(asked, name) for name in _OF_CHATS if getattr(asked, name) is not None}
    chat = parse(ChatRequest, fields | {"messages": placed.messages}, gateway.served.options)
    group, _ = chat_group(gateway, chat, request, TOKENIZE, _PREFIX)
    requests = await intake.attach(group.requests, placed.sources)
    return replace(group, requests=requests, media_places=[source.where for source in placed.sources])


def _check_special(asked: TokenizeRequest, *, default: bool) -> None:
    if asked.add_special_tokens not in (None, default):
        what = "a prompt gets them" if default else "a chat has those of its template"
        raise InvalidParamError(
            "add_special_tokens",
            f"add_special_tokens: expected {str(default).lower()}, {what}; "
            f"found {described(asked.add_special_tokens)}",
            code="not_supported",
        )


def _delivery(asked: DeliveryFields) -> dict[str, Any]:
    names = DeliveryFields.__struct_fields__
    return {name: value for name in names if (value := getattr(asked, name)) is not None}


def _in_own_words(error: InvalidParamError) -> InvalidParamError:
    """An error about the prompt, for `/detokenize`, whose field is `tokens`."""
    if error.param != "prompt":
        return error
    message = error.message.replace("prompt", "tokens", 1)
    return InvalidParamError("tokens", message, code=error.failure_code, status=error.failure_status)
