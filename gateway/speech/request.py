"""`POST /v1/audio/speech`, parsed: OpenAI's fields, and ours beside them.

What is not known is refused, as OpenAI's schema has it for this route; what is known, would change what is
heard and is not supported is refused by name.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway import errors, request_limits
from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_known, params_of
from gateway.requests.service import Served
from gateway.speech.encoder import FORMATS
from shared.errors import ClientError
from shared.events import Inputs, Params, Priority
from shared.validation_errors import described, misfit

MAX_CHARS: Final = 4096
"""The longest text that is spoken at a time, as OpenAI has it."""
WHOLE: Final = frozenset({"wav", "flac"})
"""Kinds of files that say in their head how long they are: without `stream` they come when that is known."""


class NoSpeechError(ClientError):
    """The model does not speak."""

    code = "unsupported_modality"
    param = "model"


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be said, and how it is sent.

    `stream`, `temperature` to `ignore_eos`, `request_id`, `timeout_s`, `linger_s` and `priority` are ours.
    """

    model: Annotated[str, Meta(max_length=256)]
    input: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
    voice: str | dict[str, Any] | None = None
    response_format: str = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    stream: bool | None = None
    speed: float | None = None
    instructions: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    ignore_eos: bool | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    linger_s: float | None = None
    priority: Priority | None = None

    @property
    def is_stream(self) -> bool:
        """Whether sound is sent as it comes."""
        if self.stream_format == "sse":
            return True
        return self.response_format not in WHOLE if self.stream is None else self.stream

    @property
    def inputs(self) -> Inputs:
        return Inputs(text=self.input, chat=False, output_modalities=["audio"])

    def params(self, served: Served, settings: GatewaySettings) -> Params:
        """The parameters as the log has them.

        Raises:
            InvalidParamError: a value is out of its range, or more than allowed.
        """
        request_limits.check_timeout(self.timeout_s)
        request_limits.check_linger(self.linger_s)
        name = "max_tokens" if self.max_output_tokens is None else "max_output_tokens"
        params = params_of(
            {
                "max_tokens": self.max_tokens if self.max_output_tokens is None else self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "repetition_penalty": self.repetition_penalty,
                "seed": self.seed,
                "ignore_eos": self.ignore_eos,
                "voice": _voice(self.voice, served),
            }
        )
        request_limits.check_params(params, settings, name)
        return params


def parse(body: dict[str, Any], served: Served) -> SpeechRequest:
    """The request in a JSON object.

    Raises:
        ModelNotFoundError, NoSpeechError: the model is another one, or does not speak.
        InvalidParamError: something is of the wrong type, missing, or not supported.
    """
    for name in body:
        check_known(name, SpeechRequest.__struct_fields__, what="no field of this route")
    try:
        request = msgspec.convert(body, SpeechRequest)
    except msgspec.ValidationError as error:
        raise errors.of_misfit(misfit(error, body, SpeechRequest)) from error
    served.check_model(request.model)
    if "audio" not in served.outputs:
        raise NoSpeechError(
            f"the model {served.name!r} does not speak: it puts out {', '.join(served.outputs)}"
        )
    if request.response_format not in FORMATS:
        found = described(request.response_format)
        raise InvalidParamError(
            "response_format", f"response_format: expected one of {', '.join(FORMATS)}, found {found}"
        )
    if request.speed not in {None, 1.0}:
        raise NotSupportedError("speed", request.speed, "1.0")
    if request.instructions:
        raise NotSupportedError("instructions", request.instructions, "an empty string")
    if request.stream_format == "sse" and request.stream is False:
        raise InvalidParamError("stream", "stream: expected true where stream_format is 'sse', found false")
    return request


def _voice(asked: str | dict[str, Any] | None, served: Served) -> str | None:
    """The voice's name, as a string or in an object; an unknown one is refused."""
    name = asked.get("id") if isinstance(asked, dict) else asked
    if asked is not None and name not in served.voices:
        raise InvalidParamError(
            "voice", f"voice: expected one of {', '.join(served.voices)}, found {described(name)}"
        )
    return name
