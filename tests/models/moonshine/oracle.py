"""Transformers' own Moonshine: `generate` of its two classes."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MoonshineForConditionalGeneration,
    MoonshineStreamingForConditionalGeneration,
    Wav2Vec2FeatureExtractor,
)

from tests.models.whisper.served import Samples, rounded
from tests.tiny.moonshine import POSITIONS, tiny_moonshine, tiny_streaming
from tests.tiny.whisper import RATE


@cache
def _model(folder: Path) -> tuple[Any, Any]:
    kind = (
        MoonshineStreamingForConditionalGeneration
        if folder == tiny_streaming()
        else MoonshineForConditionalGeneration
    )
    extractor = Wav2Vec2FeatureExtractor.from_pretrained(str(folder))
    return kind.from_pretrained(str(folder)).eval(), extractor


@torch.inference_mode()
def generate(sound: Samples, *, tokens_per_second: float = 6.5, folder: Path | None = None) -> list[int]:
    """The tokens of sound without those of start and end, as the published example limits them."""
    model, extractor = _model(folder or tiny_moonshine())
    padding = {"padding": True, "pad_to_multiple_of": 80} if folder == tiny_streaming() else {}
    given = extractor(rounded(sound), sampling_rate=RATE, return_tensors="pt", **padding)
    most = min(int(given.attention_mask.sum() * tokens_per_second / RATE), POSITIONS)
    found = model.generate(**given, max_length=most, do_sample=False)[0].tolist()
    ids: list[int] = [token for token in found[1:] if token != model.config.eos_token_id]
    return ids
