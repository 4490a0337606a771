"""Parsing of OpenAI's image requests, and of ours: the parameters and options of the model that draws.

A field that would change the image and is not supported is refused by name. The size, the file format and the
number of previews become options of the model's family (`models.options`), which refuses values out of their
range; a family that lacks one of these options cannot be asked for it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway import request_limits
from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import converted, params_of
from gateway.openai.known_fields import check_fields
from gateway.openai.requests import with_options
from gateway.requests.parsed_request import DeliveryFields
from gateway.served_model import ServedModel
from models import options
from shared.errors import ClientError
from shared.events import Inputs, Params
from shared.validation_errors import described

MAX_CHARS: Final = 32_000
"""The longest prompt, as in OpenAI's API."""
MAX_IMAGES: Final = 16
"""The most images of one edit, as in OpenAI's API."""
_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
    "moderation": ("auto", "low"),
    "response_format": ("b64_json",),
    "style": (),
}
"""OpenAI's fields that are not supported: the values that change nothing."""
_EDIT_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {**_NEUTRAL, "mask": (), "input_fidelity": ()}


class NoImagesError(ClientError):
    """The model does not draw."""

    code = "unsupported_modality"
    param = "model"


class ImageRequest(DeliveryFields, frozen=True, kw_only=True):
    """`POST /v1/images/generations`. `seed` to `options` are ours; so is each of the model's options."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL

    prompt: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
    model: Annotated[str, Meta(max_length=256)] | None = None
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    size: str | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    options: dict[str, Any] | None = None

    @property
    def images(self) -> int:
        """The number of images to draw."""
        return 1 if self.n is None else self.n

    @property
    def inputs(self) -> Inputs:
        return Inputs(text=self.prompt, output_modalities=["image"])

    def params(self, served: ServedModel, settings: GatewaySettings) -> Params:
        """The parameters of the request's event.

        Raises:
            InvalidParamError: a value is out of its range, or asks for what the model cannot do.
        """
        self.check_delivery()
        request_limits.check_choices(1, self.images, settings)
        params = params_of(self, options=self._all_options(served) or None)
        request_limits.check_params(params, settings)
        return params

    def _all_options(self, served: ServedModel) -> dict[str, Any]:
        """The options of the model's family: those that were given, and those that OpenAI's fields become."""
        found = dict(self.options or {})
        for field, given in self._openai_options().items():
            for name, value in given.items():
                self._check_option(field, name, value, found, served)
                found[name] = value
        return found

    def _openai_options(self) -> dict[str, dict[str, Any]]:
        """The options that OpenAI's fields become, by the field's name."""
        found: dict[str, dict[str, Any]] = {"size": _sides(self.size)}
        if self.output_format is not None:
            found["output_format"] = {"output_format": self.output_format}
        if self.output_compression is not None:
            if (self.output_format or "png") == "png" and self.output_compression != 100:
                raise InvalidParamError(
                    "output_compression",
                    "output_compression: expected it with the output_format jpeg or webp, because PNG is "
                    f"exact; found {self.output_compression} with {self.output_format or 'png'}",
                )
            found["output_compression"] = {"output_quality": max(1, self.output_compression)}
        if self.partial_images:
            if not self.stream:
                raise InvalidParamError(
                    "partial_images", "partial_images: expected none while stream is not true"
                )
            found["partial_images"] = {"partial_images": self.partial_images}
        return found

    def _check_option(
        self, field: str, name: str, value: object, given: Mapping[str, Any], served: ServedModel
    ) -> None:
        if name not in options.names(served.options):
            raise NotSupportedError(field, getattr(self, field), "null")
        if name in given and given[name] != value:
            raise InvalidParamError(
                field, f"{field}: expected it once, found it also as the option {name} with another value"
            )
        try:
            options.check(served.options, {name: value}, "")
        except ClientError as error:
            raise InvalidParamError(field, f"{field}: {error.message}") from error


class EditRequest(ImageRequest, frozen=True, kw_only=True):
    """`POST /v1/images/edits`, without its images (`gateway.images.uploads`)."""

    neutral = _EDIT_NEUTRAL


_R = TypeVar("_R", bound=ImageRequest)


def parse(kind: type[_R], body: dict[str, Any], served: ServedModel) -> _R:
    """Parse the fields of a body.

    Raises:
        ModelNotFoundError, NoImagesError: the model is another one, or does not draw.
        InvalidParamError: a field is of the wrong type, missing, out of its range, or not supported.
    """
    fields = kind.__struct_fields__
    body = with_options(body, {*fields, *kind.neutral}, served.options)
    check_fields(body, fields, kind.neutral, options.names(served.options))
    request = converted({name: value for name, value in body.items() if name in fields}, kind)
    served.check_model(request.model)
    if "image" not in served.outputs:
        raise NoImagesError(
            f"the model {served.name!r} does not draw: its outputs are {', '.join(served.outputs)}"
        )
    return request


def _sides(size: str | None) -> dict[str, Any]:
    """The width and height in pixels; none for `auto`."""
    if size is None or size == "auto":
        return {}
    found = _SIZE.fullmatch(size)
    if found is None:
        raise InvalidParamError(
            "size",
            f"size: expected auto, or pixels as WIDTHxHEIGHT such as 1024x1024, found {described(size)}",
        )
    return {"width": int(found[1]), "height": int(found[2])}
