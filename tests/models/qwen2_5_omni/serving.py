"""A tiny Qwen2.5-Omni, served, and what transformers answers."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from models.qwen2_5_omni.code2wav import noise_of
from models.qwen2_5_omni.graph import GRAPH
from shared.tensors import read_ids
from tests.models.omni.serving import SEED, Asked, Served
from tests.tiny import qwen2_5_omni as tiny

TOKENS: Final = 8
SERVED: Final = Served(GRAPH, tiny.tiny_qwen2_5_omni(), {"padding": "max_length"}, "qwen2_5_vl")


def noise(rows: int) -> torch.Tensor:
    """The noise of a request of the tests."""
    return noise_of(SEED, 0, rows, tiny.MELS)


def reference(
    asked: Asked, *, tokens: int = TOKENS, noise: Callable[[int], torch.Tensor] = noise
) -> tiny.Spoken:
    """What transformers says, with its own image processor and feature extractor."""
    ids = read_ids(SERVED.prompt_of(asked).handle("token_ids"))
    speak = partial(tiny.spoken, ids, tokens=tokens, frames=asked.frames, noise=noise)
    return speak(speaker=asked.voice, penalty=asked.penalty, **SERVED.given(asked))
