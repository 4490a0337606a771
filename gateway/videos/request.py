"""Parsing of requests for videos: OpenAI's jobs, and those of M* and mini-sglang, which wait for the answer.

Fields become options of the model's family, as those of images do (`gateway.openai.generation_fields`). So
the family decides which sizes, lengths and frame rates it can make, and names the nearest ones.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway.errors import InvalidParamError
from gateway.openai.generation_fields import SERVER_SETTINGS, GenerationFields, aspect_options
from gateway.served_model import ServedModel
from shared.events import Params

VIDEO: Final = "video"
FRAMES: Final = "frames"
"""The option for the frames as images, instead of a video."""
Seconds = Annotated[float, Meta(gt=0, le=3600)]
FrameRate = Annotated[float, Meta(gt=0, le=240)]
FrameCount = Annotated[int, Meta(ge=1)]


class VideoRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/videos`, without its `input_reference` (`gateway.videos.uploads`).

    Attributes:
        seconds: the length; OpenAI's clients send it as text.
    """

    modality: ClassVar[str] = VIDEO

    seconds: Seconds | None = None

    def openai_options(self) -> dict[str, dict[str, Any]]:
        length = {} if self.seconds is None else {"seconds": self.seconds}
        return {**super().openai_options(), "seconds": length}

    def params(self, served: ServedModel, settings: GatewaySettings) -> Params:
        found = super().params(served, settings)
        if found.options.get(FRAMES):
            raise InvalidParamError(
                FRAMES, "frames: expected false for a job, whose content is a video; use POST /generate"
            )
        return found


class GenerationRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/videos/generations`, as M* has it, with the fields of mini-sglang.

    Attributes:
        n: the number of videos; with a `seed`, each has another one.
        image, image_url: the first frame: an address, a data URL or the id of a stored file.
        video: a video to start from, in the same forms.
        response_format: the form of each video in the answer.
    """

    modality: ClassVar[str] = VIDEO
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = SERVER_SETTINGS

    n: Annotated[int, Meta(ge=1, le=4)] | None = None
    num_frames: FrameCount | None = None
    fps: FrameRate | None = None
    aspect: str | None = None
    image: str | None = None
    image_url: str | None = None
    video: str | None = None
    response_format: Literal["b64_json", "url", "b64_mp4", "frames_b64_png"] | None = None

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    def openai_options(self) -> dict[str, dict[str, Any]]:
        found = {**super().openai_options(), "aspect": aspect_options(self.aspect)}
        for name in ("num_frames", "fps"):
            value = getattr(self, name)
            found[name] = {} if value is None else {name: value}
        if self.response_format == "frames_b64_png":
            found["response_format"] = {FRAMES: True}
        return found

    def params(self, served: ServedModel, settings: GatewaySettings) -> Params:
        found = super().params(served, settings)
        if found.options.get(FRAMES) and self.response_format != "frames_b64_png":
            raise InvalidParamError(
                FRAMES, "frames: expected the response_format frames_b64_png with it, found another one"
            )
        return found


def with_number(body: dict[str, Any], name: str) -> dict[str, Any]:
    """The body with the number that a text states in the field `name`; other values stay as they are."""
    value = body.get(name)
    if not isinstance(value, str):
        return body
    try:
        return {**body, name: msgspec.json.decode(value, type=float)}
    except msgspec.MsgspecError:
        return body  # refused with the field's name
