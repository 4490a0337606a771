"""A tiny Qwen3-Omni, served, and what transformers answers."""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from models.qwen3_omni.graph import GRAPH
from shared.tensors import read_ids
from tests.models.omni.serving import Asked, Served
from tests.tiny import omni

TOKENS: Final = 8
FRAMES: Final = 12
SERVED: Final = Served(GRAPH, omni.tiny_omni(), {"padding": True, "truncation": False}, "qwen3_vl")


@cache
def reference(asked: Asked, *, tokens: int = TOKENS) -> omni.Spoken:
    """What transformers says, with its own image processor and feature extractor."""
    ids = read_ids(SERVED.prompt_of(asked).handle("token_ids"))
    return omni.spoken(
        ids,
        tokens=tokens,
        frames=asked.frames,
        speaker=asked.voice,
        penalty=asked.penalty,
        **SERVED.given(asked),
    )


@cache
def sound_of(codes: torch.Tensor) -> npt.NDArray[np.int16]:
    """The sound of all frames, (frames, groups), decoded at once by transformers."""
    with torch.inference_mode():
        wave = omni.oracle().code2wav(codes.T[None])[0, 0]
    found: npt.NDArray[np.int16] = (wave.clamp(-1, 1) * 32767).to(torch.int16).numpy()
    return found
