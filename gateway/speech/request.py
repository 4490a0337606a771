"""Parsing of `POST /v1/audio/speech`: OpenAI's fields, and ours.

Unknown fields are refused, as OpenAI's schema does for this route. Known fields that would change the audio
and are not supported are refused by name.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway import request_limits
from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import converted, params_of
from gateway.openai.known_fields import check_fields
from gateway.openai.option_fields import merged_options
from gateway.openai.requests import with_options
from gateway.requests.parsed_request import ModelRequest
from gateway.served_model import ServedModel
from gateway.sound.encoder import FORMATS
from gateway.sound.voices import voice_named
from models import options
from shared.errors import ClientError
from shared.events import Inputs, Params
from shared.validation_errors import described

MAX_CHARS: Final = 4096
"""The longest text of one request, as in OpenAI's API."""
_OPTIONS: Final = ("instructions", "language")
"""Fields that are options of a family, if it has them."""
SIZED: Final = frozenset({"wav", "flac"})
"""Formats with their length in the header: without `stream` they are sent when the length is known."""


class NoSpeechError(ClientError):
    """The model does not speak."""

    code = "unsupported_modality"
    param = "model"


class SpeechRequest(ModelRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parsed request. `stream`, `language`, and `temperature` to `options` are ours."""

    input: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
    voice: str | dict[str, Any] | None = None
    response_format: str = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    stream: bool | None = None
    speed: float | None = None
    instructions: str | None = None
    language: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    ignore_eos: bool | None = None
    options: dict[str, Any] | None = None

    @property
    def is_stream(self) -> bool:
        """True if audio is sent while it is generated."""
        if self.stream_format == "sse":
            return True
        return self.response_format not in SIZED if self.stream is None else self.stream

    @property
    def inputs(self) -> Inputs:
        return Inputs(text=self.input, output_modalities=["audio"])

    def params(self, served: ServedModel, settings: GatewaySettings) -> Params:
        """The parameters of the request's event.

        Raises:
            InvalidParamError: a value is out of its range, or more than allowed.
        """
        self.check_delivery()
        name = "max_tokens" if self.max_output_tokens is None else "max_output_tokens"
        voice = voice_named("voice", self.voice, served)
        params = params_of(
            self, max_tokens=getattr(self, name), voice=voice, options=self._options(served) or None
        )
        request_limits.check_params(params, settings, name)
        return params

    def _options(self, served: ServedModel) -> dict[str, Any]:
        """The options of the model's family: those that were given, and the fields that are some."""
        fields = {name: {name: value} for name in _OPTIONS if (value := getattr(self, name))}
        return merged_options(served, self.options, fields, self)


def parse(body: dict[str, Any], served: ServedModel) -> SpeechRequest:
    """Parse a JSON object.

    Raises:
        ModelNotFoundError, NoSpeechError: the model is another one, or does not speak.
        InvalidParamError: a field is of the wrong type, missing, or not supported.
    """
    body = with_options(body, SpeechRequest.__struct_fields__, served.options)
    check_fields(body, SpeechRequest.__struct_fields__, options=options.names(served.options))
    known = {name: value for name, value in body.items() if name in SpeechRequest.__struct_fields__}
    request = converted(known, SpeechRequest)
    served.check_model(request.model)
    if "audio" not in served.outputs:
        raise NoSpeechError(
            f"the model {served.name!r} does not speak: its outputs are {', '.join(served.outputs)}"
        )
    if not request.input.strip():
        raise InvalidParamError("input", "input: expected a text with a word, found only spaces")
    if request.response_format not in FORMATS:
        found = described(request.response_format)
        raise InvalidParamError(
            "response_format", f"response_format: expected one of {', '.join(FORMATS)}, found {found}"
        )
    if request.speed not in {None, 1.0}:
        raise NotSupportedError("speed", request.speed, "1.0")
    if request.stream_format == "sse" and request.stream is False:
        raise InvalidParamError("stream", "stream: expected true with the stream_format 'sse', found false")
    return request
