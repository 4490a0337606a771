"""The forms of weights that participants are measured with. It needs only the standard library."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

DTYPE: Final = "bfloat16"
"""The stored type, which ours is told: a CPU's default may be float32."""
BITS: Final[Mapping[str, float]] = MappingProxyType({"16": 16.0, "8": 8.5, "4": 4.5})
"""Of a weight, for which each reads files of its own; and the bits that are read with a scale."""
KINDS: Final[Mapping[str, float]] = MappingProxyType(
    {"q8_0": 8.5, "q6_k": 6.56, "q5_k_m": 5.7, "q4_k_m": 4.85, "q4_0": 4.5, "iq4_nl": 4.5}
)
"""llama.cpp's kinds of GGUF files that all may read; and the same."""
_OF_BITS: Final = {"8": "q8_0", "4": "q4_0"}


def kind_of(weights: str) -> str:
    """Return the kind of llama.cpp's file for a form; `16` for floats."""
    return _OF_BITS.get(weights, weights)


def path_of(checkpoint: Path, weights: str = "16") -> Path:
    """Return the path of llama.cpp's file, next to the checkpoint."""
    kind = kind_of(weights)
    return checkpoint.with_name(f"{checkpoint.name}{'' if kind == '16' else f'-{kind}'}.gguf")


def settings_for(checkpoint: Path, weights: str) -> tuple[Path, dict[str, Any]]:
    """Return the model that ours serves with weights of a form, and its `model_kwargs`.

    Nothing is drafted, because no peer drafts, and answers of random weights repeat themselves.
    """
    kwargs: dict[str, Any] = {"dtype": DTYPE, "speculative_tokens": 0}
    if weights in KINDS:
        return path_of(checkpoint, weights), kwargs
    return checkpoint, kwargs | ({"quantize": f"int{weights}"} if weights != "16" else {})
