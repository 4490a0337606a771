"""dllm-hub's `model_type`s (`a2d-qwen3` and the like), and what they are in transformers. No torch.

They are language models that were trained further to see later tokens ("AR to diffusion"), of two kinds:
`models.masked_diffusion` serves those that see all tokens, `models.block_diffusion` those that see blocks.
"""

from collections.abc import Mapping
from typing import Final

CLASSES: Final[Mapping[str, tuple[str, str]]] = {
    "a2d-llama": ("llama", "LlamaForCausalLM"),
    "a2d-qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "a2d-qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""The `model_type` and the class of transformers, by the published `model_type`."""
