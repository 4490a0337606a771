"""Which models our own kernels know, on CPUs and on GPUs: decoders that are built like Llama, by their class.

    states += o(attend(norm(states)))            queries and keys turned to their positions; Qwen3 norms them
    states += down(silu(gate) * up), of norm     by head, Qwen2 gives them biases

What else a kind of kernel asks of a model it says itself (`workers.cpu_kernels.decoder`,
`workers.kv_engine.gpu.decoder`).
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from models.base import KVLayout

_WINDOWS: Final[dict[str, Callable[[Any], int | None]]] = {
    "LlamaForCausalLM": lambda _: None,
    "MistralForCausalLM": lambda attention: attention.config.sliding_window,
    "Qwen2ForCausalLM": lambda attention: attention.sliding_window,
    "Qwen3ForCausalLM": lambda attention: attention.sliding_window,
}
"""The architectures that are known, and where each keeps how far a layer looks back."""


def unknown_in(node: Any) -> str:
    """What in a node is not as in these models; empty where all is."""
    if node.architecture not in _WINDOWS:
        return str(node.architecture)
    config = node.model.config
    checks = {
        f"the activation {config.hidden_act}": config.hidden_act == "silu",
        "biases in its MLP": not getattr(config, "mlp_bias", False),
        "angles for a part of a head": getattr(config, "partial_rotary_factor", None) in (1.0, None),
    }
    return first_unknown(checks)


def first_unknown(checks: dict[str, bool]) -> str:
    """The first of these that is not known; empty where all are."""
    return next((what for what, is_known in checks.items() if not is_known), "")


def window_of(architecture: str, attention: Any) -> int | None:
    """How many tokens a layer's attention looks back, its own included; None is all of them.

    By the class, not by what the configuration holds: a Llama whose file has a `sliding_window` has none.
    """
    return _WINDOWS[architecture](attention)


class LlamaLike:
    """What a node whose layers our kernels compute has of the one it is made from, on CPUs and on GPUs."""

    def __init__(self, node: Any, kernels: str) -> None:
        self._node: Final = node
        self.kernels: Final = kernels
        self.name: Final[str] = node.name
        self.architecture: Final[str] = node.architecture
        self.layout: Final[KVLayout] = node.layout
        self.max_positions: Final[int] = node.max_positions
        self.vocab_size: Final[int] = node.vocab_size
        self.parameters: Final[int] = node.parameters
        self.device: Final[torch.device] = node.device
        self.dtype: Final[torch.dtype] = node.dtype
        self._embed: Final = node.model.model.embed_tokens
        self._angles: Final = node.model.model.rotary_emb

    def use_attention(self, name: str) -> None:
        """See `workers.kv_engine.node.KVNode`."""
        self._node.use_attention(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The ids themselves: `forward` takes them, as well as embeddings."""
        return token_ids
