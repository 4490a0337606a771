"""The request of a client, in one form for every transport.

A request has the same inputs and parameters over HTTP and NATS, so one request id means one request: a
request that was sent over HTTP can be resumed over NATS.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict

import msgspec

from dalsegno.client.media import File, MediaItem, files_of
from shared.closest_match import did_you_mean
from shared.errors import ClientError
from shared.events import Inputs, Media, Params
from shared.ids import RequestId, parse_request_id
from shared.validation_errors import validation_problem

Messages = Sequence[Mapping[str, Any]]


class RequestOptions(TypedDict, total=False):
    """Optional arguments of a request; the server chooses those that are not given.

    Exactly one of the text, the messages (a chat as OpenAI writes it), `token_ids` and `texts` is the prompt.
    `texts` are several, compared with `queries` if there are any, for models that take several. `chat` False:
    the text is a raw prompt. Media are one item or a list (see `dalsegno.client.media`); parts of messages
    such as `{"type": "image", "file": 0}` place them, or else they come before the last question. `options`
    are the parameters that only this model's family has (`GET /v1/models/{id}` lists them). `guide`
    constrains the answer, with the fields of `shared.events.Guide`. `timeout_s` limits the time from the
    server's receipt to the end.
    """

    token_ids: Sequence[int]
    texts: Sequence[str | Sequence[int]]
    queries: Sequence[str | Sequence[int]]
    chat: bool
    images: MediaItem
    audio: MediaItem
    video: MediaItem
    output_modalities: Iterable[str]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float]
    bad_words: Sequence[str | Sequence[int]]
    allowed_token_ids: Sequence[int]
    min_tokens: int | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    echo: bool | Literal["ids"]
    voice: str | None
    guide: Mapping[str, Any] | None
    dimensions: int | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    max_tokens_per_doc: int | None
    cache_salt: str | None
    warm: bool
    options: Mapping[str, Any]
    model: str | None
    timeout_s: float | None


MAX_TIMEOUT_S: Final = 86400.0
"""The longest time limit that a gateway accepts."""
_MEDIA: Final = {"images": "image", "audio": "audio", "video": "video"}
_PARAMS: Final = [
    field.name for field in msgspec.structs.fields(Params) if field.name in RequestOptions.__annotations__
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request.

    Attributes:
        files: the contents of `inputs.files`, in the same order.
        model: None for the served model.
        chooses_outputs: True if the output modalities were given, or follow from the arguments.
        timeout_s: None for the server's limit.
    """

    request_id: RequestId
    inputs: Inputs
    params: Params
    files: tuple[File, ...] = ()
    model: str | None = None
    chooses_outputs: bool = True
    timeout_s: float | None = None

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """The given parameters, as plain values."""
        given: dict[str, Any] = msgspec.to_builtins(self.params)
        return given


def client_request(
    text: str | None, messages: Messages | None, request_id: str | None, how: Mapping[str, Any]
) -> ClientRequest:
    """Return the request for a caller's arguments; its id is generated if None.

    Raises:
        TypeError: an argument is unknown.
        ClientError: a value is invalid.
    """
    for name in how:
        _check_known(name)
    files = [file for name, modality in _MEDIA.items() for file in files_of(modality, how.get(name))]
    chosen = f"py-{secrets.token_hex(12)}" if request_id is None else request_id
    return ClientRequest(
        request_id=parse_request_id(chosen),
        inputs=_inputs(
            {"messages": messages, "text": text, **{name: how.get(name) for name in ("token_ids", "texts")}},
            how,
            files,
        ),
        params=_params(how),
        files=tuple(files),
        model=how.get("model"),
        chooses_outputs=_wanted(how) is not None,
        timeout_s=_seconds("timeout_s", how.get("timeout_s")),
    )


def _wanted(how: Mapping[str, Any]) -> list[str] | None:
    """The output modalities: as given, or sound if there is a voice; None leaves them to the server."""
    outputs = how.get("output_modalities", ("audio",) if how.get("voice") else None)
    return [outputs] if isinstance(outputs, str) else None if outputs is None else list(outputs)


def _inputs(prompts: Mapping[str, Any], how: Mapping[str, Any], files: Sequence[File]) -> Inputs:
    given = {name: value for name, value in prompts.items() if value is not None}
    if files and not given:
        given = {"text": ""}  # some models answer a file alone
    if files and "messages" in given:
        given["messages"] = with_places(given["messages"], files)
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ClientError(f"expected one of a text, messages, token_ids and texts; found {found}")
    texts = [] if files and (given.get("text") == "" or given.get("texts") == []) else ["text"]
    modalities = list(dict.fromkeys([*(file.modality for file in files), *texts]))
    plain = {
        **given,
        "queries": list(how.get("queries", ())),
        "chat": how.get("chat", True),
        "input_modalities": modalities,
        "output_modalities": _wanted(how) or ["text"],
    }
    inputs: Inputs = _fitted(plain, Inputs)
    return msgspec.structs.replace(inputs, files=[_medium_of(file) for file in files])


def with_places(messages: Messages, files: Sequence[File]) -> list[Mapping[str, Any]]:
    """Return messages that place the files; those that place none get all files before the last question."""
    changed = list(messages)
    if any(_places_a_file(message) for message in changed):
        return changed
    parts: list[Any] = [{"type": file.modality, "file": number} for number, file in enumerate(files)]
    for number in reversed(range(len(changed))):
        message = changed[number]
        if message.get("role") == "user":
            content = message.get("content")
            rest = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
            changed[number] = {**message, "content": [*parts, *rest]}
            break
    return changed


def _places_a_file(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and isinstance(part.get("file"), int) for part in content
    )


def _medium_of(file: File) -> Media:
    return Media(
        modality=file.modality,
        digest=hashlib.sha256(file.data).hexdigest(),
        size=len(file.data),
        content_type=file.content_type,
        name=file.name,
    )


def _params(how: Mapping[str, Any]) -> Params:
    given = {name: how[name] for name in _PARAMS if how.get(name) is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    params: Params = _fitted(given, Params)
    return params


def _seconds(name: str, found: float | None) -> float | None:
    if found is not None and not 0 < found <= MAX_TIMEOUT_S:
        wrong = ClientError(
            f"{name}: expected seconds above 0 and at most {MAX_TIMEOUT_S:g}, found {found!r}",
            code="invalid_value",
        )
        wrong.param = name
        raise wrong
    return found


def _fitted(plain: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        found = validation_problem(error, plain, kind)
        wrong = ClientError(found.message, code="invalid_value")
        wrong.param = found.place or None
        raise wrong from error


def _check_known(name: str) -> None:
    known = RequestOptions.__annotations__
    if name in known:
        return
    advice = did_you_mean(name, known, otherwise=f"expected one of {', '.join(known)}")
    raise TypeError(f"unknown argument {name!r}: {advice}")
