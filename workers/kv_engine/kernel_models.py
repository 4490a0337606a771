"""The models that our own CPU and GPU kernels support: decoders built like Llama, by their class.

    states += o(attend(norm(states)))            queries and keys are rotated to their positions; Qwen3 norms
    states += down(silu(gate) * up), of norm     them by head, Qwen2 adds biases

Each kind of kernel has further requirements (`workers.cpu_kernels.decoder`, `workers.kv_engine.gpu.decoder`).
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
"""The supported architectures, and the sliding window of an attention layer in each."""


def unknown_in(node: Any) -> str:
    """Return the first unsupported feature of a node; empty if there is none."""
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
    """Return the name of the first check that is False; empty if all are True."""
    return next((what for what, is_known in checks.items() if not is_known), "")


def window_of(architecture: str, attention: Any) -> int | None:
    """Return the sliding window of an attention layer in tokens, its own included; None is no window.

    The class decides, not the configuration: a Llama has no window even if its file has a `sliding_window`.
    """
    return _WINDOWS[architecture](attention)


class LlamaLike:
    """Base of the nodes whose layers our kernels compute: the attributes of the original node."""

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
        """See `workers.kv_engine.node.Backbone`."""
        self._node.use_attention(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the ids: `forward` embeds them."""
        return token_ids
