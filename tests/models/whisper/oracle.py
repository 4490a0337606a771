"""Transformers' own Whisper: `WhisperForConditionalGeneration.generate`."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.models.whisper.served import Samples, rounded
from tests.tiny.whisper import RATE, WINDOW_S


@cache
def _model(folder: Path) -> tuple[Any, Any]:
    model = WhisperForConditionalGeneration.from_pretrained(str(folder)).eval()
    return model, WhisperFeatureExtractor.from_pretrained(str(folder))


@torch.inference_mode()
def generate(folder: Path, sound: Samples, **options: Any) -> dict[str, Any]:
    """What `generate` returns for samples: `sequences`, and `segments` if times are asked for."""
    model, extractor = _model(folder)
    model.generation_config = GenerationConfig.from_pretrained(str(folder))  # `generate` writes into it
    found = extractor(rounded(sound), sampling_rate=RATE, return_tensors="pt", **_padding(sound))
    result = model.generate(found.input_features, **options)
    return result if isinstance(result, dict) else {"sequences": result}


@torch.inference_mode()
def language(folder: Path, sound: Samples) -> int:
    """The token of the language that transformers detects."""
    model, extractor = _model(folder)
    frames = WINDOW_S * 100
    found = extractor(
        rounded(sound), sampling_rate=RATE, return_tensors="pt", **_padding(sound)
    ).input_features
    return int(model.detect_language(found, num_segment_frames=frames)[0])


def _padding(sound: Samples) -> dict[str, Any]:
    is_long = len(sound) > WINDOW_S * RATE
    return {"truncation": False, "padding": "longest"} if is_long else {}
