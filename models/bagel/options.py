"""BAGEL's own request parameters, and what they come to for one request. The names are those of M*."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shared.errors import ClientError

SIDE_STEP: Final = 16
"""The width and height of an image are multiples of it: a token stands for 16 x 16 pixels."""
MAX_SIDE: Final = 1024
Scale = Annotated[float, Meta(ge=0, le=100)]
Time = Annotated[float, Meta(ge=0, le=1)]
Side = Annotated[int, Meta(ge=SIDE_STEP, le=MAX_SIDE, multiple_of=SIDE_STEP)]
Renorm = Literal["global", "channel", "text_channel"]


class BagelOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The drawing of an image. An *edit* is a request with an image in it.

    Attributes:
        width: pixels, a multiple of 16, by default 1024. An edit has the size of its last image; with a width
            or a height, its images are scaled to fit.
        height: pixels, as `width`.
        num_timesteps: points in time of the flow; one step fewer is computed.
        timestep_shift: above 1, more of the steps are early, where the image is mostly noise.
        cfg_text_scale: guidance by the last text: 1 and less is none, and then there is none by images.
        cfg_img_scale: guidance by the images, above 1; by default 1, of an edit 2.
        cfg_interval: guidance is used at times above the first number, up to the second; a flow goes from 1
            to 0. By default [0.4, 1], of an edit [0, 1].
        cfg_renorm_type: the norm that guidance keeps: of the whole velocity, of each token's, or of each
            token's before guidance by images. By default `global`, of an edit `text_channel`.
        cfg_renorm_min: the least factor by which a guided velocity is scaled down.
        think_mode: let the model think in writing first. The thoughts are the text of the answer.
        output_format: the file format of the image.
        output_quality: of JPEG and WebP, from 1 to 100.
        partial_images: unfinished images to show while the image is drawn, as previews.
    """

    width: Side | None = None
    height: Side | None = None
    num_timesteps: Annotated[int, Meta(ge=2, le=1000)] = 50
    timestep_shift: Annotated[float, Meta(ge=0.01, le=100)] = 3.0
    cfg_text_scale: Scale = 4.0
    cfg_img_scale: Scale | None = None
    cfg_interval: tuple[Time, Time] | None = None
    cfg_renorm_type: Renorm | None = None
    cfg_renorm_min: Annotated[float, Meta(ge=0, le=1)] = 0.0
    think_mode: bool = False
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_quality: Annotated[int, Meta(ge=1, le=100)] = 90
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0


class FlowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one flow, without open defaults; a part of the arguments of its walk.

    Attributes:
        text_scale, img_scale: the weights of guidance; 1 is none.
        interval: the times with guidance: above the first, up to the second.
    """

    num_timesteps: int
    timestep_shift: float
    text_scale: float
    img_scale: float
    interval: tuple[float, float]
    renorm: Renorm
    renorm_min: float
    partial_images: int = 0


def flow_settings(options: BagelOptions, *, is_edit: bool) -> FlowSettings:
    """The settings of a request's flow; those that it leaves open differ for an edit.

    Raises:
        ClientError: the interval ends before it begins.
    """
    low, high = options.cfg_interval or ((0.0, 1.0) if is_edit else (0.4, 1.0))
    if low > high:
        wrong = ClientError(
            f"cfg_interval: expected two times from 0 to 1 in order, found [{low}, {high}]",
            code="invalid_value",
        )
        wrong.param = "cfg_interval"
        raise wrong
    scale = options.cfg_img_scale
    return FlowSettings(
        num_timesteps=options.num_timesteps,
        timestep_shift=options.timestep_shift,
        text_scale=options.cfg_text_scale,
        img_scale=scale if scale is not None else (2.0 if is_edit else 1.0),
        interval=(low, high),
        renorm=options.cfg_renorm_type or ("text_channel" if is_edit else "global"),
        renorm_min=options.cfg_renorm_min,
        partial_images=options.partial_images,
    )
