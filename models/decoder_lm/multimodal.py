"""Multimodal checkpoints whose language model is served alone: no family here computes their other parts.

No torch: the conductor asks for these names, too.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from models.checkpoints.claims import CheckpointInfo

LANGUAGE_MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
        "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
        "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
        "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    }
)
"""The class of transformers that computes the language model of an architecture, and nothing else of it."""


def remarks_of(checkpoint: Path) -> list[str]:
    """Say which part of a multimodal checkpoint is served."""
    architecture = CheckpointInfo.read(checkpoint).architecture
    if architecture not in LANGUAGE_MODELS:
        return []
    return [
        f"of {architecture}, the language model is served: requests with images, videos or sound are refused"
    ]
