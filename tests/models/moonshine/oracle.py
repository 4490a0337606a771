"""Transformers' own Moonshine: `MoonshineForConditionalGeneration.generate`."""

from functools import cache
from typing import Any

import torch
from transformers import MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor

from tests.models.whisper.served import Samples, rounded
from tests.tiny.moonshine import POSITIONS, tiny_moonshine
from tests.tiny.whisper import RATE


@cache
def _model() -> tuple[Any, Any]:
    folder = str(tiny_moonshine())
    return (
        MoonshineForConditionalGeneration.from_pretrained(folder).eval(),
        Wav2Vec2FeatureExtractor.from_pretrained(folder),
    )


@torch.inference_mode()
def generate(sound: Samples, *, tokens_per_second: float = 6.5) -> list[int]:
    """The tokens of sound without those of start and end, as the published example limits them."""
    model, extractor = _model()
    given = extractor(rounded(sound), sampling_rate=RATE, return_tensors="pt")
    most = min(int(given.attention_mask.sum() * tokens_per_second / RATE), POSITIONS)
    found = model.generate(**given, max_length=most, do_sample=False)[0].tolist()
    ids: list[int] = [token for token in found[1:] if token != model.config.eos_token_id]
    return ids
