"""The fields that requests for images and for videos have in common, and their way into a model's options.

A field that would change the result and is not supported is refused by name. The size and other fields of
OpenAI's become options of the model's family (`models.options`), which refuses values out of their range; a
family that lacks one of these options cannot be asked for it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway import request_limits
from gateway.errors import InvalidParamError
from gateway.http.bodies import converted, params_of
from gateway.openai.known_fields import check_fields
from gateway.openai.option_fields import merged_options, option_fields
from gateway.openai.requests import with_options
from gateway.requests.parsed_request import DeliveryFields
from gateway.served_model import ServedModel
from models import options
from shared.errors import ClientError
from shared.events import Inputs, Params
from shared.picture_size import sides_of
from shared.validation_errors import described

MAX_CHARS: Final = 32_000
"""The longest prompt, as in OpenAI's API."""
SERVER_SETTINGS: Final[Mapping[str, tuple[object, ...]]] = {
    "backend": (),
    "device": ("auto",),
    "attention_backend": ("sdpa",),
    "compile": (False,),
    "cpu_offload": (False,),
    "gguf": (False,),
    "gguf_file": (),
    "model_dir": (),
}
"""Fields of mini-sglang that choose how a server runs. Here the deployment does: the values it takes."""
ASPECTS: Final[Mapping[str, tuple[int, int]]] = {
    "1:1": (1024, 1024), "16:9": (1280, 720), "9:16": (720, 1280), "4:3": (1088, 816), "3:4": (816, 1088),
}  # fmt: skip
"""The widths and heights that mini-sglang has for each `aspect`."""
_MADE: Final = {"image": "draw", "video": "make videos"}


class NotGeneratedError(ClientError):
    """The model has no output of the modality that the route answers with."""

    code = "unsupported_modality"
    param = "model"


class GenerationFields(DeliveryFields, frozen=True, kw_only=True):
    """The common fields. `seed` and `options` are ours; so is each of the model's options.

    `neutral` are fields that are not supported, each with the values that change nothing; `modality` is that
    of the answer.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    modality: ClassVar[str]

    prompt: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
    model: Annotated[str, Meta(max_length=256)] | None = None
    size: str | None = None
    seed: int | None = None
    options: dict[str, Any] | None = None

    @property
    def inputs(self) -> Inputs:
        return Inputs(text=self.prompt, output_modalities=[self.modality])

    @property
    def answers(self) -> int:
        """The number of images or videos."""
        return 1

    def params(self, served: ServedModel, settings: GatewaySettings) -> Params:
        """The parameters of the request's event.

        Raises:
            InvalidParamError: a value is out of its range, or asks for what the model cannot do.
        """
        self.check_delivery()
        request_limits.check_choices(1, self.answers, settings)
        found = merged_options(served, self.options, self.openai_options(), self)
        params = params_of(self, options=found or None)
        request_limits.check_params(params, settings)
        return params

    def openai_options(self) -> dict[str, dict[str, Any]]:
        """The options that the route's own fields become, by the field's name."""
        return {"size": size_options(self.size)}

    @property
    def option_fields(self) -> dict[str, str]:
        """The fields that become options of other names, by the option."""
        return option_fields(self.openai_options())


_D = TypeVar("_D", bound=GenerationFields)


def parse(kind: type[_D], body: dict[str, Any], served: ServedModel) -> _D:
    """Parse the fields of a body.

    Raises:
        ModelNotFoundError, NotGeneratedError: the model is another one, or has no such output.
        InvalidParamError: a field is of the wrong type, missing, out of its range, or not supported.
    """
    fields = kind.__struct_fields__
    body = with_options(body, {*fields, *kind.neutral}, served.options)
    check_fields(body, fields, kind.neutral, options.names(served.options))
    request = converted({name: value for name, value in body.items() if name in fields}, kind)
    served.check_model(request.model)
    check_output(served, kind.modality)
    return request


def check_output(served: ServedModel, modality: str) -> None:
    """Refuse a model without outputs of a modality.

    Raises:
        NotGeneratedError: it has none.
    """
    if modality not in served.outputs:
        raise NotGeneratedError(
            f"the model {served.name!r} does not {_MADE[modality]}: its outputs are "
            f"{', '.join(served.outputs)}"
        )


def size_options(size: str | None) -> dict[str, Any]:
    """The width and height in pixels; none for `auto`.

    Raises:
        InvalidParamError: it is no size.
    """
    if size is None or size == "auto":
        return {}
    sides = sides_of(size)
    if sides is None:
        raise InvalidParamError(
            "size",
            f"size: expected auto, or pixels as WIDTHxHEIGHT such as 1024x1024, found {described(size)}",
        )
    width, height = sides
    return {"width": width, "height": height}


def aspect_options(aspect: str | None) -> dict[str, Any]:
    """The width and height of an aspect ratio, as mini-sglang has them.

    Raises:
        InvalidParamError: it is none of `ASPECTS`.
    """
    if aspect is None:
        return {}
    if aspect not in ASPECTS:
        raise InvalidParamError(
            "aspect", f"aspect: expected one of {', '.join(ASPECTS)}, found {described(aspect)}"
        )
    width, height = ASPECTS[aspect]
    return {"width": width, "height": height}
