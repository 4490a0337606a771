"""The request parameters of pipelines, under diffusers' names, which M* uses as well. Pure."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

MAX_SIDE: Final = 4096
Scale = Annotated[float, Meta(ge=0, le=100)]
Side = Annotated[int, Meta(ge=8, le=MAX_SIDE)]
Text = Annotated[str, Meta(max_length=32_000)]


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The drawing of an image. Defaults that are left open are those of the class of the pipeline.

    Attributes:
        size: width and height in one, such as `1024x768`.
        width: in pixels; a multiple of what a token of the model stands for.
        height: in pixels, as `width`.
        num_inference_steps: the denoising steps.
        guidance_scale: the weight of the prompt; 1 and less is none, if the model was not distilled for it.
        true_cfg_scale: for models that have a guidance besides a distilled one: the weight of the prompt
            against the negative prompt.
        negative_prompt: what the image should not show, for models with guidance.
        max_sequence_length: the most tokens of a prompt; the rest is cut off.
        strength: of a pipeline that changes an image: the share of the steps that are run.
        step_cache: the relative change of the denoiser's input below which its last output is used again; 0
            is off. The usage counts `cached_calls`, and `cache_error_ppm`, the measured relative error of
            outputs that were used again, in millionths.
        lora: one of the adapters that the deployment names (`model_kwargs.loras`).
        lora_scale: the weight of the adapter.
        output_format: the file format of an image.
        output_quality: of JPEG and WebP, from 1 to 100.
        partial_images: unfinished images to show on the way, as previews.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"steps": "num_inference_steps"}

    size: Annotated[str, Meta(pattern="^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")] | None = None
    width: Side | None = None
    height: Side | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    negative_prompt: Text | None = None
    max_sequence_length: Annotated[int, Meta(ge=1, le=4096)] | None = None
    strength: Annotated[float, Meta(ge=0, le=1)] | None = None
    step_cache: Annotated[float, Meta(ge=0, le=1)] = 0.0
    lora: str | None = None
    lora_scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_quality: Annotated[int, Meta(ge=1, le=100)] = 90
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0


class VideoOptions(ImageOptions, frozen=True, kw_only=True, omit_defaults=True):
    """The making of a video.

    Attributes:
        num_frames: the frames; a multiple of those that a token of the model stands for, plus 1.
        seconds: the length, in place of `num_frames`: the nearest number of frames that the model can make.
        fps: the frames per second of the file.
        guidance_scale_2: the weight of the prompt in the second half of a model with two denoisers.
        frames: true: each frame is a PNG file, in place of one MP4 file.
    """

    num_frames: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=600)] | None = None
    fps: Annotated[float, Meta(ge=1, le=120)] | None = None
    guidance_scale_2: Scale | None = None
    frames: bool = False


class CosmosOptions(VideoOptions, frozen=True, kw_only=True, omit_defaults=True):
    """The making of an image or a video by Cosmos3.

    Attributes:
        use_system_prompt: put the published instruction before the prompt.
        use_resolution_template: say the size in the prompt.
        use_duration_template: say the length in the prompt.
        generate_sound: make a sound track, where the checkpoint can.
    """

    use_system_prompt: bool = False
    use_resolution_template: bool = False
    use_duration_template: bool = False
    generate_sound: bool = False
