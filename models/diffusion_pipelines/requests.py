"""The arguments of a pipeline's `__call__` for one request, checked against its class. Pure.

Everything that a class would refuse in the middle, or round silently, is refused here with the nearest value
that it takes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy.typing as npt

from models.diffusion_pipelines.classes import IMAGE, USUAL_PROMPT, VIDEO, PipelineClass, class_of
from models.diffusion_pipelines.folder import PipelineFolder
from models.diffusion_pipelines.options import CosmosOptions, ImageOptions, VideoOptions
from models.options import InvalidOptionError
from shared.errors import ClientError

_OPTIONAL: Final = (
    "negative_prompt", "max_sequence_length", "true_cfg_scale", "guidance_scale_2", "strength",
)  # fmt: skip
_OF_COSMOS: Final[Mapping[str, str]] = {
    "use_system_prompt": "use_system_prompt",
    "use_resolution_template": "add_resolution_template",
    "use_duration_template": "add_duration_template",
    "generate_sound": "enable_sound",
}
"""Cosmos3's options, and the arguments of its `__call__`."""


class PipelineCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The call of a pipeline: facts that `prepare` reports to the plan.

    Attributes:
        makes: the modality of the output.
        call: keyword arguments of `__call__`, without prompts, pictures and the generator.
        width, height: in pixels; 0 if the pipeline decides.
        frames: of a video; 1 for an image; 0 if the pipeline decides.
        fps: of the file.
        steps: denoising steps; 0 if the pipeline decides.
        sound_rate: samples per second of a sound track.
        lora: the adapter, with its `path` and `scale`; None for none.
    """

    makes: str
    call: dict[str, Any]
    width: int
    height: int
    frames: int
    fps: float
    steps: int
    sound_rate: int = 0
    lora: dict[str, Any] | None = None


def pipeline_call(
    folder: PipelineFolder, options: ImageOptions, *, makes: str, pictures: int
) -> PipelineCall:
    """The call for a request that asks for the modality `makes`, with so many input images.

    Raises:
        ClientError: the class cannot do what the options ask for; it names the nearest value that it can.
    """
    kind = class_of(folder)
    _check_kind(folder.kind, kind, makes, pictures)
    width, height = _size(kind, folder, options, pictures)
    steps = _steps(kind, options, makes)
    fps = _fps(kind, options)
    frames = _frames(kind, folder, options, fps) if makes == VIDEO else 1
    call: dict[str, Any] = {"width": width, "height": height, "num_inference_steps": steps}
    call = {name: value for name, value in call.items() if value}
    call |= _guidance(kind, options) | _optional(folder.kind, kind, options) | _prompt(kind, folder, options)
    if VIDEO in kind.makes and frames:
        call["num_frames"] = frames
    if kind.frame_rate and makes == VIDEO:
        call[kind.frame_rate] = fps
    if isinstance(options, CosmosOptions):
        call |= {argument: getattr(options, name) for name, argument in _OF_COSMOS.items()}
    return PipelineCall(
        makes=makes,
        call=call,
        width=width,
        height=height,
        frames=frames,
        fps=fps,
        steps=steps,
        sound_rate=int(folder.config("sound_tokenizer").get("sampling_rate") or 0),
    )


def _check_kind(name: str, kind: PipelineClass, makes: str, pictures: int) -> None:
    if makes not in kind.makes:
        raise ClientError(
            f"output_modalities: {name} makes {' and '.join(kind.makes)}, found {makes!r}",
            code="unsupported_modality",
        )
    least, most = kind.images
    if not least <= pictures <= most:
        wanted = "no input image" if not most else f"{least} to {most} input images"
        wanted = "one input image" if least == most == 1 else wanted
        raise ClientError(f"files: {name} takes {wanted}, found {pictures}", code="invalid_value")


def check_pictures(folder: PipelineFolder, pictures: Sequence[npt.NDArray[Any]]) -> None:
    """Check the input images, each (height, width, 3).

    Raises:
        ClientError: the class cannot read one of this size.
    """
    kind = class_of(folder)
    for number, picture in enumerate(pictures):
        short, long = sorted(picture.shape[:2])
        problem = None
        if short < kind.least_side:
            problem = f"at least {kind.least_side} pixels a side"
        elif kind.most_ratio and long > kind.most_ratio * short:
            problem = f"sides of at most {kind.most_ratio} to 1"
        if problem:
            height, width = picture.shape[:2]
            raise ClientError(
                f"files[{number}]: expected an image with {problem}, found {width}x{height}",
                code="invalid_value",
            )


def _size(
    kind: PipelineClass, folder: PipelineFolder, options: ImageOptions, pictures: int
) -> tuple[int, int]:
    """Width and height; 0 and 0 if the pipeline decides."""
    step, usual, most = kind.side_step(folder), kind.size(folder), kind.longest_side(folder)
    asked = _asked_size(options)
    if kind.follows_image and pictures:
        usual = (0, 0)
    width, height = asked[0] or usual[0], asked[1] or usual[1]
    for name, side in zip(("width", "height"), asked, strict=True):
        if side is not None:
            _check_multiple(name, side, step=step, least=step, most=most - most % step)
    if bool(asked[0]) != bool(asked[1]) and not usual[0]:
        missing = "height" if asked[0] else "width"
        raise InvalidOptionError(missing, f"{missing}: expected both width and height, or none of them")
    return width, height


def _asked_size(options: ImageOptions) -> tuple[int | None, int | None]:
    """The width and the height that a request states."""
    if options.size is None:
        return options.width, options.height
    if options.width is not None or options.height is not None:
        raise InvalidOptionError("size", "size: expected it, or width and height; found both")
    width, height = map(int, options.size.split("x"))
    return width, height


def _check_multiple(name: str, value: int, *, step: int, least: int, most: int, plus: int = 0) -> None:
    if least <= value <= most and (value - plus) % step == 0:
        return
    nearest = min(max(round((value - plus) / step) * step + plus, least), most)
    rule = f"a multiple of {step}" + (f" plus {plus}" if plus else "")
    raise InvalidOptionError(
        name, f"{name}: expected {rule} from {least} to {most}, found {value}; the nearest is {nearest}"
    )


def _steps(kind: PipelineClass, options: ImageOptions, makes: str) -> int:
    usual, most = kind.steps
    if makes == IMAGE:
        usual = kind.image_steps or usual
    steps = options.num_inference_steps or usual
    if steps > most:
        raise InvalidOptionError(
            "num_inference_steps",
            f"num_inference_steps: expected 1 to {most}, found {steps}; the nearest is {most}",
        )
    return steps


def _fps(kind: PipelineClass, options: ImageOptions) -> float:
    return (isinstance(options, VideoOptions) and options.fps) or kind.fps


def _frames(kind: PipelineClass, folder: PipelineFolder, options: ImageOptions, fps: float) -> int:
    """The frames of a video; of a length in seconds, the nearest number that the model makes."""
    if not isinstance(options, VideoOptions):
        return kind.frames
    step = kind.frame_step(folder)
    most = kind.most_frames(folder)
    most -= (most - 1) % step
    if options.num_frames is not None and options.seconds is not None:
        raise InvalidOptionError(
            "seconds", "seconds: expected a length in seconds, or num_frames; found both"
        )
    if options.seconds is not None:
        frames = max(0, round((options.seconds * fps - 1) / step)) * step + 1
        if frames > most:
            longest = most / fps
            raise InvalidOptionError(
                "seconds", f"seconds: expected at most {longest:g}, {most} frames, found {options.seconds:g}"
            )
        return frames
    if options.num_frames is not None:
        plus = 1 if step > 1 else 0
        _check_multiple("num_frames", options.num_frames, step=step, least=1, most=most, plus=plus)
        return options.num_frames
    return min(kind.frames, most)


def _guidance(kind: PipelineClass, options: ImageOptions) -> dict[str, Any]:
    scale, true_scale = options.guidance_scale, options.true_cfg_scale
    if kind.guidance == "true_cfg_scale":
        if scale is not None and true_scale is not None and scale != true_scale:
            raise InvalidOptionError(
                "true_cfg_scale",
                f"true_cfg_scale: it is this model's guidance_scale, found {true_scale:g} and {scale:g}",
            )
        scale = true_scale if scale is None else scale
    return {} if scale is None else {kind.guidance: scale}


def _prompt(kind: PipelineClass, folder: PipelineFolder, options: ImageOptions) -> dict[str, Any]:
    """The most tokens of the prompt, where the model has positions for fewer than its class cuts at."""
    most, asked = kind.longest_prompt(folder), options.max_sequence_length
    if asked is None:
        return {"max_sequence_length": most} if most < USUAL_PROMPT else {}
    if asked > most:
        raise InvalidOptionError(
            "max_sequence_length",
            f"max_sequence_length: expected 1 to {most}, found {asked}; the nearest is {most}",
        )
    return {"max_sequence_length": asked}


def _optional(name: str, kind: PipelineClass, options: ImageOptions) -> dict[str, Any]:
    """The options that not every class has, without those that are passed elsewhere."""
    given = {one: getattr(options, one, None) for one in _OPTIONAL}
    given = {one: value for one, value in given.items() if value is not None}
    if kind.guidance == "true_cfg_scale":
        given.pop("true_cfg_scale", None)
    for one in given:
        if kind.takes is not None and one not in kind.takes:
            raise InvalidOptionError(one, f"{one}: {name} has no such option; leave it out")
    for elsewhere in ("negative_prompt", "max_sequence_length"):
        given.pop(elsewhere, None)
    return given
