"""The requests whose answers by the published code are recorded in `published.npz` (`record_published`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PUBLISHED: Final = Path(__file__).with_name("published.npz")
SEED: Final = 7
"""The seed of all cases: that of `torch.manual_seed` before the published code runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request.

    Attributes:
        inputs: its texts and images in order; None is `picture()`.
        options: those of the published `InterleaveInferencer.interleave_inference`.
        every: of the latents and of the rows and columns of pixels, every so many are recorded.
    """

    inputs: tuple[str | None, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1


_UNDERSTAND: Final = {"understanding_output": True, "do_sample": False, "max_think_token_n": 16}
_SMALL: Final = {"image_shapes": (64, 48), "num_timesteps": 6, "cfg_text_scale": 4.0, "cfg_img_scale": 1.0}
CASES: Final[Mapping[str, Case]] = {
    "text": Case(inputs=("what does len do?",), options=_UNDERSTAND),
    "image_text": Case(inputs=(None, "what is this?"), options=_UNDERSTAND),
    "draw": Case(inputs=("a red circle",), options=_SMALL),
    "draw_plain": Case(inputs=("a red circle",), options=_SMALL | {"cfg_text_scale": 1.0}),
    "draw_channel": Case(
        inputs=("a red circle",),
        options=_SMALL | {"cfg_interval": [0, 1], "cfg_renorm_type": "channel", "cfg_renorm_min": 0.5},
    ),
    "draw_text_channel": Case(
        inputs=("a red", "circle"),
        options=_SMALL | {"cfg_img_scale": 2.0, "cfg_renorm_type": "text_channel", "cfg_interval": [0, 1]},
    ),
    "draw_think": Case(
        inputs=("a red circle",),
        options=_SMALL | {"think": True, "max_think_token_n": 12, "do_sample": False},
    ),
    "edit": Case(
        inputs=(None, "make it blue"),
        options={
            "num_timesteps": 3,
            "cfg_text_scale": 4.0,
            "cfg_img_scale": 2.0,
            "cfg_interval": [0, 1],
            "cfg_renorm_type": "text_channel",
        },
        every=16,
    ),
}


def picture() -> NDArray[np.uint8]:
    """The image of the cases: 64 x 64, RGB."""
    rows, columns = np.mgrid[:64, :64]
    waves = [
        np.sin(rows / 7) + np.cos(columns / 5),
        np.sin(rows * columns / 300),
        np.cos((rows - columns) / 9),
    ]
    return (np.stack(waves, axis=-1).clip(-1, 1) * 127 + 128).astype(np.uint8)


def published() -> Mapping[str, NDArray[Any]]:
    """The recordings, by `<case>.token_ids`, `<case>.latents` and `<case>.pixels`."""
    with np.load(PUBLISHED) as file:
        return dict(file)
