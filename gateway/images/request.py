"""Parsing of OpenAI's image requests, and of ours. mini-sglang's fields for images are understood, too."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta

from gateway.errors import InvalidParamError
from gateway.openai.generation_fields import MAX_CHARS, SERVER_SETTINGS, GenerationFields, aspect_options
from gateway.served_model import ServedModel
from models import options
from shared.errors import ClientError

MAX_IMAGES: Final = 16
"""The most images of one edit, as in OpenAI's API."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    **SERVER_SETTINGS,
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
    "moderation": ("auto", "low"),
    "style": (),
}
"""OpenAI's and mini-sglang's fields that are not supported: the values that change nothing."""
_EDIT_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {**_NEUTRAL, "mask": (), "input_fidelity": ()}
STRENGTH: Final = "strength"
"""The option of models that can start from an image: how much of it may change."""


class ImageRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/images/generations`. `temperature` to `max_tokens` are ours: some models think in writing."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL
    modality: ClassVar[str] = "image"

    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    aspect: str | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def gives_addresses(self) -> bool:
        """The answer has addresses of stored files, and not the images themselves.

        Raises:
            InvalidParamError: the answer is a stream, whose events have no addresses.
        """
        if self.response_format != "url":
            return False
        if self.stream:
            raise InvalidParamError(
                "response_format", "response_format: expected b64_json while stream is true, found 'url'"
            )
        return True

    def openai_options(self) -> dict[str, dict[str, Any]]:
        found = {**super().openai_options(), "aspect": aspect_options(self.aspect)}
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


class EditRequest(ImageRequest, frozen=True, kw_only=True):
    """`POST /v1/images/edits`, without its images (`gateway.images.uploads`)."""

    neutral = _EDIT_NEUTRAL


class VariationRequest(ImageRequest, frozen=True, kw_only=True):
    """`POST /v1/images/variations`, without its image. It needs no prompt."""

    neutral = _EDIT_NEUTRAL

    prompt: Annotated[str, Meta(max_length=MAX_CHARS)] = ""


class NoVariationsError(ClientError):
    """The model does not start from an image."""

    code = "not_supported"
    param = "model"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model {name!r} makes no variations: that needs images among its inputs, and the option "
            f"{STRENGTH}; POST /v1/images/edits takes images with a prompt"
        )


def check_varies(served: ServedModel) -> None:
    """Refuse variations by a model that does not start from an image.

    Raises:
        NoVariationsError: it has no option `strength`, or takes no images.
    """
    if "image" not in served.modalities or STRENGTH not in options.names(served.options):
        raise NoVariationsError(served.name)
