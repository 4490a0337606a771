"""OpenAI's requests, and what of them goes on the log.

Names that are unknown are accepted and left alone, as OpenAI's clients expect. Names that are known, would
change the answer and are not supported are refused by name: an answer that ignores them would be wrong in
silence. Ranges are not judged here but by `shared.events.Params`, for HTTP and NATS alike.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta

from gateway import errors
from gateway.bodies import params_of
from gateway.errors import InvalidParamError, NotSupportedError
from shared.events import Inputs, Params
from shared.misfit import described, misfit

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream says beside the answer."""

    include_usage: bool | None = None


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes have in common. `request_id`, `top_k` and `ignore_eos` are ours."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "n": (1,),
        "logit_bias": ({},),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "min_tokens": (0,),
    }

    model: Annotated[str, Meta(max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    request_id: str | None = None

    @property
    def limit_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self) -> Params:
        """The parameters as the log has them.

        Raises:
            InvalidParamError: a value is out of its range.
        """
        given = {
            "max_tokens": self.limit_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "ignore_eos": self.ignore_eos,
        }
        return params_of(given)


class ChatRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_Request.neutral,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    }

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: int | None = None

    @property
    def limit_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def inputs(self) -> Inputs:
        """The chat, as the client wrote it.

        Raises:
            ClientError: a message is none, or not text.
        """
        for number, message in enumerate(self.messages):
            _check_message(f"messages[{number}]", message)
        return Inputs(messages=self.messages)


class CompletionRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/completions`: a raw prompt, without the chat template."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_Request.neutral,
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "suffix": ("",),
    }

    prompt: Any

    def inputs(self) -> Inputs:
        """The prompt: text or token ids.

        Raises:
            ClientError: it is neither, or several.
        """
        match self.prompt:
            case str(text) | [str(text)]:
                return Inputs(text=text, chat=False)
            case [int(), *_] | [[int(), *_]]:
                ids = self.prompt[0] if isinstance(self.prompt[0], list) else self.prompt
                return _token_prompt(ids)
            case [_, _, *_]:
                raise InvalidParamError(
                    "prompt",
                    f"prompt: a list of {len(self.prompt)} prompts is not supported yet; "
                    "send them one at a time",
                    code="not_supported",
                )
            case _:
                raise InvalidParamError(
                    "prompt",
                    f"prompt: expected a string or an array of token ids, found {described(self.prompt)}",
                )


_R = TypeVar("_R", ChatRequest, CompletionRequest)


def parse(kind: type[_R], body: dict[str, Any]) -> _R:
    """The request in a JSON object.

    Raises:
        InvalidParamError: something in it is of the wrong type, missing, or not supported.
    """
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise errors.of_misfit(misfit(error, body, kind)) from error
    for name, neutral in kind.neutral.items():
        found = body.get(name)
        if found is not None and found not in neutral:
            allowed = " or ".join(msgspec.json.encode(value).decode() for value in neutral) or "null"
            raise NotSupportedError(name, found, allowed)
    if request.stream_options is not None and not request.stream:
        raise InvalidParamError("stream_options", "stream_options: expected none while stream is not true")
    return request


_TEXT_PARTS: Final = ("text",)


def _check_message(where: str, message: dict[str, Any]) -> None:
    role = message.get("role")
    if role not in ROLES:
        found = described(role) if "role" in message else "nothing"
        raise InvalidParamError(
            f"{where}.role", f"{where}.role: expected one of {', '.join(ROLES)}, found {found}"
        )
    content = message.get("content")
    if content is None and role == "assistant":
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidParamError(
            f"{where}.content",
            f"{where}.content: expected a string or an array of parts, found {described(content)}",
        )
    for number, part in enumerate(content):
        _check_part(f"{where}.content[{number}]", part)


def _check_part(where: str, part: object) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidParamError(where, f"{where}: expected an object with a type, found {described(part)}")
    if kind not in _TEXT_PARTS:
        raise InvalidParamError(
            where,
            f"{where}: this model takes parts of type 'text' only, found {described(kind)}",
            code="unsupported_modality",
        )
    if not isinstance(part.get("text"), str):
        raise InvalidParamError(
            f"{where}.text", f"{where}.text: expected a string, found {described(part.get('text'))}"
        )


def _token_prompt(ids: object) -> Inputs:
    given = {"token_ids": ids, "chat": False}
    try:
        return msgspec.convert(given, Inputs)
    except msgspec.ValidationError as error:
        wrong = misfit(error, given, Inputs)
        place = wrong.place.replace("token_ids", "prompt", 1)
        raise InvalidParamError("prompt", f"{place}: {wrong.problem}") from error
