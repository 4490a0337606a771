"""Parsing of requests for transcripts: OpenAI's fields, which become options of the model's family.

A field that the family has no option for is refused by name, and so is a value out of the option's range.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway import request_limits
from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import converted, params_of
from gateway.openai.known_fields import check_fields
from gateway.openai.option_fields import merged_options, option_fields
from gateway.openai.requests import with_options
from gateway.requests.parsed_request import ModelRequest
from gateway.served_model import ServedModel
from models import options
from shared.errors import ClientError
from shared.events import Inputs, Params

TEXT: Final = "text"
TRANSCRIPT: Final = "transcript"
"""The output modality with segments, times and language (ADR 56)."""
TIMESTAMPS: Final = "timestamps"
"""The option with the times to find."""
_WITH_TIMES: Final = frozenset({"srt", "verbose_json", "vtt"})
"""Formats that state the times of segments."""
MAX_CHARS: Final = 32_000
Granularity = Literal["segment", "word"]
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "chunking_strategy": ("auto",),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
}
"""Fields of OpenAI's that are not supported: the values that change nothing."""


class NotTranscribedError(ClientError):
    """The model does not transcribe speech."""

    code = "unsupported_modality"
    param = "model"


class NotTranslatedError(ClientError):
    """The model transcribes speech, and does not translate it."""

    code = "not_supported"
    param = "model"


class TranslationRequest(ModelRequest, frozen=True, kw_only=True):
    """`POST /v1/audio/translations`, without its file. `seed` and `options` are ours.

    `task` is the family's option for what is written, and `neutral` are fields that are not supported, each
    with the values that change nothing.
    """

    task: ClassVar[str] = "translate"
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    prompt: Annotated[str, Meta(max_length=MAX_CHARS)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    options: dict[str, Any] | None = None

    @property
    def inputs(self) -> Inputs:
        return Inputs(text="", output_modalities=[TEXT, TRANSCRIPT])

    def params(self, served: ServedModel, settings: GatewaySettings) -> Params:
        """The parameters of the request's event.

        Raises:
            InvalidParamError: a value is out of its range, or asks for what the model cannot do.
        """
        self.check_delivery()
        fields = {**self.openai_options(), "task": {"task": self.task}}
        found = merged_options(served, self.options, fields, self)
        if self.response_format in _WITH_TIMES and TIMESTAMPS in options.names(served.options):
            found.setdefault(TIMESTAMPS, ["segment"])
        params = params_of(self, options=found)
        request_limits.check_params(params, settings)
        return params

    def openai_options(self) -> dict[str, dict[str, Any]]:
        """The options that the route's own fields become, by the field's name."""
        return {} if self.prompt is None else {"prompt": {"prompt": self.prompt}}

    @property
    def option_fields(self) -> dict[str, str]:
        """The fields that become options of other names, by the option."""
        return option_fields(self.openai_options())


class TranscriptionRequest(TranslationRequest, frozen=True, kw_only=True):
    """`POST /v1/audio/transcriptions`, without its file."""

    task: ClassVar[str] = "transcribe"
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL

    language: Annotated[str, Meta(max_length=64)] | None = None
    timestamp_granularities: list[Granularity] | None = None
    stream: bool | None = None
    include: list[str] | None = None

    def openai_options(self) -> dict[str, dict[str, Any]]:
        found = super().openai_options()
        if self.language is not None:
            found["language"] = {"language": self.language}
        if self.timestamp_granularities:
            found["timestamp_granularities"] = {TIMESTAMPS: sorted(set(self.timestamp_granularities))}
        return found


_R = TypeVar("_R", bound=TranslationRequest)


def parse(kind: type[_R], fields: dict[str, Any], served: ServedModel) -> _R:
    """Parse the fields of a form.

    Raises:
        ModelNotFoundError, NotTranscribedError, NotTranslatedError: the model is another one, or writes no
            transcripts, or none in another language.
        InvalidParamError: a field is of the wrong type, missing, out of its range, or not supported.
    """
    own = kind.__struct_fields__
    body = with_options(fields, {*own, *kind.neutral}, served.options)
    check_fields(body, own, kind.neutral, options.names(served.options))
    request = converted({name: value for name, value in body.items() if name in own}, kind)
    served.check_model(request.model)
    if TRANSCRIPT not in served.outputs:
        raise NotTranscribedError(
            f"the model {served.name!r} does not transcribe: its outputs are {', '.join(served.outputs)}"
        )
    if isinstance(request, TranscriptionRequest):
        _check_forms(request)
    else:
        _check_translates(kind.task, served)
    return request


def _check_translates(task: str, served: ServedModel) -> None:
    try:
        options.check(served.options, {"task": task})
    except ClientError as error:
        raise NotTranslatedError(
            f"the model {served.name!r} does not translate speech; POST /v1/audio/transcriptions writes it "
            "down in the language that is spoken"
        ) from error


def _check_forms(request: TranscriptionRequest) -> None:
    """Refuse what the format of the answer cannot say."""
    form = request.response_format
    if request.timestamp_granularities and form != "verbose_json":
        raise InvalidParamError(
            "timestamp_granularities",
            f"timestamp_granularities: expected the response_format verbose_json with it, found {form}",
        )
    if request.stream and form not in ("json", "text"):
        raise InvalidParamError(
            "stream", f"stream: expected the response_format json or text with it, found {form}"
        )
    if request.include:
        raise NotSupportedError("include", request.include, "an empty list")
