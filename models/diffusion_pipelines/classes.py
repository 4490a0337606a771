"""The classes of pipelines that are served in parts, and the sizes that each of them takes. No torch.

The rules are those of the classes of diffusers 0.42: what they refuse, and what they round silently. A class
without an entry runs as one node (`models.whole_pipeline`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, Final

from models.diffusion_pipelines.folder import PipelineFolder

IMAGE: Final = "image"
VIDEO: Final = "video"
MAX_SIDE: Final = 2048
MAX_FRAMES: Final = 1025
MAX_PROMPT: Final = 4096
USUAL_PROMPT: Final = 512
"""The most tokens of a prompt, of most classes."""
_PROMPT_STEP: Final = 32
"""Z-Image pads a prompt to a multiple of so many tokens."""


_USUAL: Final = frozenset({"negative_prompt", "max_sequence_length"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineClass:
    """The facts of a class.

    Attributes:
        makes: the modalities that it makes; the first one is the usual.
        steps: the steps of a request that asks for none, and the most.
        image_steps: those of an image, of a class that makes videos, too; 0: as `steps`.
        side_step: a width and a height are multiples of it, in pixels.
        longest_side: the largest width and height, in pixels: a model may have positions for no more.
        size: width and height of a request that asks for none.
        follows_image: without a size, the result has that of the input image.
        longest_prompt: the most tokens of a prompt: a model may have positions for no more.
        frames: the frames of a request that asks for none; 1 for images.
        most_frames: the longest video, in frames: a model may have positions for no more.
        frame_step: the number of frames is a multiple of it, plus 1.
        fps: the frames per second of a request that asks for none.
        guidance: the argument of `__call__` that is the request's `guidance_scale`.
        frame_rate: the argument of `__call__` with the frames per second; empty: only the file has them.
        images: the input images that it takes, at least and at most.
        least_side: of an input image, in pixels.
        most_ratio: of an input image's longer side to its shorter one; 0: any.
        takes: the options that it has besides size, steps and guidance; None: they are checked by the
            pipeline itself.
    """

    makes: tuple[str, ...] = (IMAGE,)
    steps: tuple[int, int] = (50, 1000)
    image_steps: int = 0
    side_step: Callable[[PipelineFolder], int]
    longest_side: Callable[[PipelineFolder], int] = lambda _: MAX_SIDE
    size: Callable[[PipelineFolder], tuple[int, int]] = lambda _: (1024, 1024)
    follows_image: bool = False
    longest_prompt: Callable[[PipelineFolder], int] = lambda _: MAX_PROMPT
    frames: int = 1
    most_frames: Callable[[PipelineFolder], int] = lambda _: MAX_FRAMES
    frame_step: Callable[[PipelineFolder], int] = lambda _: 1
    fps: float = 24.0
    guidance: str = "guidance_scale"
    frame_rate: str = ""
    images: tuple[int, int] = (0, 0)
    least_side: int = 1
    most_ratio: int = 0
    takes: frozenset[str] | None = _USUAL


def _halved_latents(folder: PipelineFolder) -> int:
    """Two latents to a patch, behind a VAE of images."""
    return 2 * folder.image_scale


def _z_image_longest(folder: PipelineFolder) -> int:
    """The positions of its rotary embedding: it has tables of this length."""
    tables = folder.config("transformer").get("axes_lens") or (1024, 512, 512)
    return min(MAX_SIDE, min(tables[1:]) * _halved_latents(folder))


def _z_image_prompt(folder: PipelineFolder) -> int:
    """The positions of a prompt, and one behind it, at which the picture begins."""
    tables = folder.config("transformer").get("axes_lens") or (1024, 512, 512)
    return max(_PROMPT_STEP, min(MAX_PROMPT, (tables[0] - 2) // _PROMPT_STEP * _PROMPT_STEP))


def _z_image_size(folder: PipelineFolder) -> tuple[int, int]:
    side = min(1024, _z_image_longest(folder))
    return side, side


def _patched_latents(folder: PipelineFolder) -> int:
    return int(folder.config("transformer").get("patch_size", 2)) * folder.image_scale


def _sample_size(part: str) -> Callable[[PipelineFolder], tuple[int, int]]:
    """The size that a model was trained for, in latents."""

    def size(folder: PipelineFolder) -> tuple[int, int]:
        side = int(folder.config(part).get("sample_size") or 128) * folder.image_scale
        return side, side

    return size


def _wan_step(folder: PipelineFolder) -> int:
    patch = folder.config("transformer").get("patch_size", (1, 2, 2))
    return lcm(16, folder.video_scale * int(patch[1]))


def _wan_latents(folder: PipelineFolder, axis: int) -> int:
    """The most latents of an axis (0: time): its rotary embedding has a position for each patch of them."""
    transformer = folder.config("transformer")
    patch = int(transformer.get("patch_size", (1, 2, 2))[axis])
    return int(transformer.get("rope_max_seq_len") or 1024) * patch


def _wan_longest(folder: PipelineFolder) -> int:
    return min(MAX_SIDE, _wan_latents(folder, 1) * folder.video_scale)


def _wan_most_frames(folder: PipelineFolder) -> int:
    return min(MAX_FRAMES, (_wan_latents(folder, 0) - 1) * _wan_frame_step(folder) + 1)


def _wan_size(folder: PipelineFolder) -> tuple[int, int]:
    """720p for Wan2.2's small model, as M* has it; otherwise that of the class, where its table allows it."""
    width, height = (1280, 704) if _wan_step(folder) % 32 == 0 else (832, 480)
    longest = _wan_longest(folder)
    return min(width, longest), min(height, longest)


def _wan_frame_step(folder: PipelineFolder) -> int:
    return int(folder.config("vae").get("scale_factor_temporal", 4))


def _ltx_frame_step(folder: PipelineFolder) -> int:
    vae = folder.config("vae")
    halvings = sum(bool(one) for one in vae.get("spatio_temporal_scaling", (True, True, True, False)))
    return int(vae.get("patch_size_t", 1) * 2**halvings)


def _cosmos_step(folder: PipelineFolder) -> int:
    patch = int(folder.config("transformer").get("latent_patch_size", 2))
    return folder.video_scale * patch


def _wan(**changes: Any) -> PipelineClass:
    return PipelineClass(
        makes=(VIDEO,),
        steps=(50, 100),
        side_step=_wan_step,
        longest_side=_wan_longest,
        size=_wan_size,
        frames=81,
        most_frames=_wan_most_frames,
        frame_step=_wan_frame_step,
        takes=_USUAL | {"guidance_scale_2"},
        **changes,
    )


def _ltx(**changes: Any) -> PipelineClass:
    return PipelineClass(
        makes=(VIDEO,),
        side_step=lambda _: 32,
        size=lambda _: (704, 512),
        frames=161,
        frame_step=_ltx_frame_step,
        fps=25.0,
        frame_rate="frame_rate",
        **changes,
    )


KNOWN: Final[Mapping[str, PipelineClass]] = {
    "ZImagePipeline": PipelineClass(
        side_step=_halved_latents,
        longest_side=_z_image_longest,
        size=_z_image_size,
        longest_prompt=_z_image_prompt,
    ),
    "QwenImagePipeline": PipelineClass(
        side_step=lambda folder: 2 * folder.video_scale, guidance="true_cfg_scale"
    ),
    "FluxPipeline": PipelineClass(
        side_step=_halved_latents, steps=(28, 1000), takes=_USUAL | {"true_cfg_scale"}
    ),
    "Flux2KleinPipeline": PipelineClass(
        side_step=_halved_latents,
        images=(0, 4),
        follows_image=True,
        least_side=64,
        most_ratio=8,
        takes=frozenset({"max_sequence_length"}),
    ),
    "StableDiffusion3Pipeline": PipelineClass(
        side_step=_patched_latents, steps=(28, 1000), size=_sample_size("transformer")
    ),
    "StableDiffusionXLPipeline": PipelineClass(
        side_step=lambda folder: lcm(8, folder.image_scale),
        size=_sample_size("unet"),
        takes=frozenset({"negative_prompt"}),
    ),
    "WanPipeline": _wan(),
    "WanImageToVideoPipeline": _wan(images=(1, 1)),
    "LTXPipeline": _ltx(),
    "LTXImageToVideoPipeline": _ltx(images=(1, 1)),
    "Cosmos3OmniPipeline": PipelineClass(
        makes=(VIDEO, IMAGE),
        steps=(35, 1000),
        image_steps=50,
        side_step=_cosmos_step,
        size=lambda _: (1280, 704),
        frames=17,
        frame_step=_wan_frame_step,
        frame_rate="fps",
        images=(0, 1),
        takes=frozenset({"negative_prompt"}),
    ),
}
"""By the name of the class in `model_index.json`."""

_OTHER: Final[Mapping[str, Any]] = {
    "side_step": lambda _: 8, "size": lambda _: (0, 0), "steps": (0, 1000), "images": (0, 16), "takes": None,
}  # fmt: skip
OTHER_IMAGES: Final = PipelineClass(**_OTHER)
"""A class without an entry: the defaults and the errors are its own."""
OTHER_VIDEOS: Final = PipelineClass(makes=(VIDEO,), frames=0, **_OTHER)


def class_of(folder: PipelineFolder) -> PipelineClass:
    """The facts of a folder's class."""
    if (known := KNOWN.get(folder.kind)) is not None:
        return known
    return OTHER_VIDEOS if folder.makes_videos else OTHER_IMAGES
