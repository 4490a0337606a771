"""Parsing of `/generate` requests: M*'s form, or the same fields as a JSON object.

`text` is one user message, rendered with the checkpoint's chat template: the same request as a chat of one
message. These fields are ours: `chat`, which makes `text` a raw prompt if it is false; `messages`, a chat as
OpenAI writes it; and `token_ids`. An unknown name is an error that suggests the closest known one.
"""

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, get_args

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from gateway import request_limits
from gateway.errors import InvalidParamError
from gateway.generate import files
from gateway.generate.tensor_files import TENSOR_FORMATS, TensorFormat
from gateway.http.bodies import check_known, converted, parse_json, parse_object, read_object
from gateway.http.content_types import FORMS, URL_ENCODED, content_type
from gateway.http.forms import FormLimits, open_form
from gateway.media import parts
from gateway.media.intake import MediaIntake
from gateway.media.parts import PlacedMedia
from gateway.media.sources import MediaSource
from gateway.openai import requests as openai_requests
from gateway.openai.requests import ChatRequest
from gateway.requests.parsed_request import DeliveryFields
from gateway.served_model import ServedModel
from models import options
from models.base import OF_PROMPTS
from models.options import Options
from models.voices import known_voice
from shared.errors import ClientError
from shared.events import Effort, Inputs, Params, Priority
from shared.validation_errors import described, validation_problem

QUESTIONS: Final = ("text", "messages", "token_ids")
"""The prompt: exactly one of these is required, or `TEXTS`."""
TEXTS: Final = "texts"
_LIMITS: Final = ("max_tokens", "max_output_tokens", "max_new_tokens", "gen_length")
MODEL_KWARGS: Final = (
    *_LIMITS, "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "seed", "stop",
    "stop_token_ids", "ignore_eos", "logprobs", "echo", "voice", "guide", "thinking_budget", "dimensions",
    "truncate_prompt_tokens", "truncation_side", "max_tokens_per_doc", "cache_salt", "warm", "options",
)  # fmt: skip
FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "text": {"type": "string"},
    "messages": {"type": "array", "items": {"type": "object"}},
    "token_ids": {"type": "array", "items": {"type": "integer"}},
    TEXTS: {"type": "array", "items": {"type": ["string", "array"]}},
    "queries": {"type": "array", "items": {"type": ["string", "array"]}},
    "chat": {"type": "boolean", "default": True},
    "chat_template_kwargs": {"type": "object"},
    "reasoning_effort": {"type": "string"},
    "files": {
        "type": "array",
        "items": {"anyOf": [{"type": "string", "format": "binary"}, {"type": "object"}]},
    },
    "continue_final_message": {"type": "boolean", "default": False},
    "input_modalities": {"type": "string"},
    "output_modalities": {"type": "string"},
    "streaming": {"type": "boolean", "default": True},
    "tensor_format": {"type": "string", "enum": [*TENSOR_FORMATS], "default": "raw"},
    "model_kwargs": {"type": "object", "properties": {name: {} for name in MODEL_KWARGS}},
    "request_id": {"type": "string"},
    "model": {"type": "string"},
    "timeout_s": {"type": "number"},
    "linger_s": {"type": "number"},
    "priority": {"type": "integer", "minimum": -100, "maximum": 100},
}
"""All fields, with their schemas."""
EFFORTS: Final = get_args(Effort)
_BOOLEANS: Final[Mapping[str, bool]] = {
    "true": True, "1": True, "yes": True, "on": True,
    "false": False, "0": False, "no": False, "off": False,
}  # fmt: skip


class GenerateRequest(DeliveryFields, frozen=True, kw_only=True):
    """A parsed request."""

    inputs: Inputs
    params: Params
    streaming: bool
    tensor_format: TensorFormat
    joins_files: bool
    model: str | None
    media: Sequence[MediaSource] = ()


@asynccontextmanager
async def open_body(request: Request, limits: FormLimits) -> AsyncGenerator[Mapping[str, Any], None]:
    """The fields of a body: a form, or a JSON object. Uploaded files are open until the end of the block.

    Raises:
        ClientError: the body is neither.
    """
    kind = content_type(request)
    is_json = kind == URL_ENCODED and (await request.body())[:64].lstrip().startswith(b"{")
    if kind in FORMS and not is_json:
        async with open_form(request, limits) as form:
            yield _fields_of(form)
    else:
        yield await read_object(request)


def parse(fields: Mapping[str, Any], served: ServedModel, intake: MediaIntake) -> GenerateRequest:
    """Parse the fields of a form or a JSON object.

    Raises:
        InvalidParamError: a name is unknown, or a value is wrong.
    """
    for name in fields:
        check_known(name, FIELDS, "", hint=f"model_kwargs.{name}" if name in MODEL_KWARGS else None)
    served.check_model(_text(fields, "model"))
    uploads = files.file_sources(fields.get("files"))
    placed = _placed(fields.get("messages"), uploads, intake)
    uploads = [replace(one, modality=placed.placed.get(n, "")) for n, one in enumerate(uploads)]
    intake.check_sources(media := [*uploads, *placed.sources])
    outputs = _modalities(fields, "output_modalities", served, served.outputs[:1], served.outputs)
    prompt = _prompt(fields, placed, served, is_chat=OF_PROMPTS.isdisjoint(outputs))
    return GenerateRequest(
        inputs=msgspec.structs.replace(
            _with_template_options(prompt, fields),
            input_modalities=_modalities(
                fields, "input_modalities", served, ("text",), ("text", *served.modalities)
            ),
            output_modalities=outputs,
        ),
        params=_with_known_voice(model_kwargs(fields.get("model_kwargs"), served.options), served),
        streaming=_boolean(fields, "streaming", default=True),
        tensor_format=_tensor_format(fields),
        joins_files=fields.get("tensor_format") != "raw",
        model=_text(fields, "model"),
        request_id=_text(fields, "request_id") or None,
        timeout_s=_seconds(fields, "timeout_s", request_limits.check_timeout),
        linger_s=_seconds(fields, "linger_s", request_limits.check_disconnect_grace),
        priority=_priority(fields),
        media=media,
    )


def model_kwargs(found: object, family: Options | None = None) -> Params:
    """Parse `model_kwargs`: an object, or its JSON. `family` declares the options of the model's family.

    Raises:
        ClientError: it is something else, or a parameter is wrong.
    """
    if found is None or found == "":
        return Params()
    if isinstance(found, str):
        try:
            found = parse_object(found, "model_kwargs")
        except ClientError as error:
            raise InvalidParamError("model_kwargs", error.message, code=error.code) from error
    if not isinstance(found, dict):
        raise InvalidParamError("model_kwargs", f"model_kwargs: expected an object, found {described(found)}")
    own = (*options.names(family), *options.other_names(family))
    for name in found:
        check_known(name, (*MODEL_KWARGS, *own), "model_kwargs.")
    present = {name: value for name, value in found.items() if value is not None}
    found = options.renamed(family, present, "model_kwargs.")
    given_options = _options(found, family)
    limits = {name: found[name] for name in _LIMITS if found.get(name) is not None}
    if len({repr(value) for value in limits.values()}) > 1:
        raise InvalidParamError(
            "model_kwargs", f"model_kwargs: expected one limit of the answer, found {limits}"
        )
    given = {
        name: value
        for name, value in found.items()
        if name in MODEL_KWARGS and name not in _LIMITS and value is not None
    }
    if given_options:
        given["options"] = given_options
    if limits:
        given["max_tokens"] = next(iter(limits.values()))
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return converted(given, Params, "model_kwargs.")


def _options(found: Mapping[str, Any], family: Options | None) -> dict[str, Any]:
    """The options of the model's family, each of its own name or under `options`, checked."""
    nested = found.get("options")
    if nested is not None and not isinstance(nested, dict):
        raise InvalidParamError(
            "model_kwargs.options", f"model_kwargs.options: expected an object, found {described(nested)}"
        )
    nested = options.renamed(family, nested or {}, "model_kwargs.options.")
    given = {name: found[name] for name in options.names(family) if found.get(name) is not None}
    options.check(family, nested, "model_kwargs.options.")
    options.check(family, given, "model_kwargs.")
    return {**nested, **given}


def _with_known_voice(params: Params, served: ServedModel) -> Params:
    """The parameters, if the model has their voice."""
    if params.voice is not None and known_voice(params.voice, served.voices) is None:
        known = _listed(served.voices) or "none: this model does not speak"
        raise InvalidParamError(
            "model_kwargs.voice",
            f"model_kwargs.voice: expected one of {known}, found {described(params.voice)}",
        )
    return params


def _placed(messages: object, uploads: Sequence[MediaSource], intake: MediaIntake) -> PlacedMedia:
    """The messages with their media taken out; each upload must have a place in them."""
    if messages is None:
        return PlacedMedia(messages=None)
    found = parts.place(
        _list("messages", messages), uploads=len(uploads), check_modality=intake.check_modality
    )
    for index, upload in enumerate(uploads):
        if index not in found.placed:
            raise InvalidParamError(
                upload.where,
                f"{upload.where}: expected a part of messages that places it, such as "
                f'{{"type": "image", "file": {index}}}, found none',
            )
    return found


def _prompt(fields: Mapping[str, Any], placed: PlacedMedia, served: ServedModel, *, is_chat: bool) -> Inputs:
    """The prompt: a text, a chat, or token ids. `is_chat` is the default of `chat` for a text.

    Files without a question are a request with an empty text: some models answer a file alone.
    """
    questions = (*QUESTIONS, TEXTS)
    given = {name: fields[name] for name in questions if fields.get(name) is not None}
    if not given and fields.get("files"):
        given = {"text": ""} if fields.get("queries") is None else {TEXTS: []}
    if not given:
        message = "text: expected a string, found nothing"
        raise InvalidParamError("text", message, code="missing_required_parameter")
    if len(given) > 1:
        *_, last = given
        raise InvalidParamError(last, f"{last}: expected one of {_listed(questions)}, found {_listed(given)}")
    [(name, value)] = given.items()
    if name == TEXTS:
        queries = _list("queries", fields.get("queries") or [])
        return converted({TEXTS: _list(TEXTS, value), "queries": queries, "chat": False}, Inputs)
    if fields.get("queries") is not None:
        raise InvalidParamError(
            "queries", "queries: expected none without texts, which they are compared with"
        )
    if name == "text":
        return Inputs(text=_text(fields, name) or "", chat=_boolean(fields, "chat", default=is_chat))
    if name == "messages":
        return openai_requests.parse(ChatRequest, {"model": served.name, name: placed.messages}).inputs()
    if fields.get("files"):
        raise InvalidParamError(
            "files", "files: expected none beside token_ids, which have no place for them"
        )
    return converted({name: _list(name, value), "chat": False}, Inputs)


def _with_template_options(inputs: Inputs, fields: Mapping[str, Any]) -> Inputs:
    """The prompt with what its chat template is asked for."""
    continues = _boolean(fields, "continue_final_message", default=False)
    options = fields.get("chat_template_kwargs") or {}
    if isinstance(options, str):
        try:
            options = parse_object(options, "chat_template_kwargs")
        except ClientError as error:
            raise InvalidParamError("chat_template_kwargs", error.message, code=error.code) from error
    effort = _text(fields, "reasoning_effort") or None
    if not options and effort is None and not continues:
        return inputs
    if not isinstance(options, dict):
        raise InvalidParamError(
            "chat_template_kwargs", f"chat_template_kwargs: expected an object, found {described(options)}"
        )
    if effort not in (None, *EFFORTS):
        raise InvalidParamError(
            "reasoning_effort",
            f"reasoning_effort: expected one of {_listed(EFFORTS)}, found {described(effort)}",
        )
    try:
        return msgspec.structs.replace(
            inputs, template_options=options, reasoning_effort=effort, continue_final_message=continues
        )
    except ValueError as error:
        problem = str(error).replace("template_options", "chat_template_kwargs", 1)
        raise InvalidParamError(problem.partition(":")[0], problem) from error


def _list(name: str, found: object) -> list[Any]:
    """An array, or its JSON from a form."""
    if isinstance(found, str):
        try:
            found = parse_json(found, name)
        except ClientError as error:
            raise InvalidParamError(name, error.message, code=error.code) from error
    if not isinstance(found, list):
        raise InvalidParamError(name, f"{name}: expected an array, found {described(found)}")
    return found


def _fields_of(form: FormData) -> dict[str, Any]:
    """The form's fields. Only `files` may be repeated; an empty field counts as absent."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name in {"files", "files[]"}:
            fields.setdefault("files", []).append(value)
        elif isinstance(value, UploadFile):
            raise InvalidParamError(name, f"{name}: expected text, found a file")
        elif name in fields:
            raise InvalidParamError(name, f"{name}: expected it once, found it more than once")
        else:
            fields[name] = value
    return fields


def _modalities(
    fields: Mapping[str, Any], name: str, served: ServedModel, default: Sequence[str], known: Sequence[str]
) -> list[str]:
    """The modalities in a field, or the `default` ones; each must be one of `known`."""
    found = fields.get(name)
    if found is None or found == "":
        return list(default)
    names = found.split(",") if isinstance(found, str) else found
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise InvalidParamError(
            name, f"{name}: expected names, separated by commas, found {described(found)}"
        )
    found_names = list(dict.fromkeys(one.strip() for one in names if one.strip()))
    for one in found_names:
        if one not in known:
            raise InvalidParamError(
                name,
                f"{name}: the model {served.name!r} knows {_listed(known)}, found {described(one)}",
                code="unsupported_modality",
            )
    return found_names or list(default)


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    found = fields.get(name)
    if found is None or isinstance(found, str):
        return found
    raise InvalidParamError(name, f"{name}: expected a string, found {described(found)}")


def _boolean(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    found = fields.get(name)
    if found is None or found == "":
        return default
    value = found if isinstance(found, bool) else _BOOLEANS.get(str(found).strip().lower())
    if value is None:
        raise InvalidParamError(name, f"{name}: expected true or false, found {described(found)}")
    return value


def _tensor_format(fields: Mapping[str, Any]) -> TensorFormat:
    found = fields.get("tensor_format")
    if found is None or found == "":
        return "raw"
    if found not in TENSOR_FORMATS:
        raise InvalidParamError(
            "tensor_format",
            f"tensor_format: expected one of {_listed(TENSOR_FORMATS)}, found {described(found)}",
        )
    form: TensorFormat = found
    return form


def _seconds(fields: Mapping[str, Any], name: str, check: Callable[[float | None], None]) -> float | None:
    found = fields.get(name)
    if found is None or found == "":
        return None
    try:
        seconds = (
            float(found) if isinstance(found, str | int | float) and not isinstance(found, bool) else math.nan
        )
    except (ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidParamError(name, f"{name}: expected a number, found {described(found)}")
    check(seconds)
    return seconds


def _priority(fields: Mapping[str, Any]) -> int:
    found = fields.get("priority")
    if found is None or found == "":
        return 0
    try:
        return msgspec.convert(found, Priority, strict=not isinstance(found, str))
    except msgspec.ValidationError as error:
        problem = validation_problem(error, found, Priority).problem
        raise InvalidParamError("priority", f"priority: {problem}") from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
