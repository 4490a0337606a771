"""The models that our own CPU and GPU kernels support: decoders built like Llama, by their class.

    states += o(attend(norm(states)))            queries and keys are rotated to their positions; Qwen3 norms
    states += down(silu(gate) * up), of norm     them by head, Qwen2 adds biases
    states += rows                               after the first layers, for the images of Qwen3-VL

In place of the one MLP of a layer, a router may choose a few of many (`EXPERTS`): on CPUs.

The language model inside a vision-language class is one of them, too: its body decides, not the class around
it. Each kind of kernel has further requirements (`workers.cpu_kernels.decoder`,
`workers.kv_engine.gpu.decoder`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from models.base import KVLayout
from models.sequence_request import PromptPart
from workers.kv_engine.node import (
    embed_width_of,
    masks_of,
    position_axes_of,
    programs_of,
    token_programs_of,
    towers_of,
)

_WINDOWS: Final[dict[str, Callable[[Any], int | None]]] = {
    "LlamaModel": lambda _: None,
    "MistralModel": lambda attention: attention.config.sliding_window,
    "Qwen2Model": lambda attention: attention.sliding_window,
    "Qwen2_5_VLTextModel": lambda attention: attention.sliding_window,
    "Qwen3Model": lambda attention: attention.sliding_window,
    "Qwen3VLTextModel": lambda _: None,
    "MixtralModel": lambda attention: attention.config.sliding_window,
    "Qwen2MoeModel": lambda attention: getattr(attention, "sliding_window", None),
    "Qwen3MoeModel": lambda attention: attention.sliding_window,
    "Qwen3VLMoeTextModel": lambda _: None,
    "GptOssModel": lambda attention: attention.sliding_window,
}
"""The supported bodies, and the sliding window of an attention layer in each."""

EXPERTS: Final = frozenset(
    {"MixtralModel", "Qwen2MoeModel", "Qwen3MoeModel", "Qwen3VLMoeTextModel", "GptOssModel"}
)
"""Those whose layers have experts (transformers' `experts` and their router, with a softmax over scores)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """The parts of a node's language model that kernels read.

    Attributes:
        body: `embed_tokens`, `layers`, `norm` and `rotary_emb`; None if the node has no such module.
        config: the config of the body.
        head: the linear layer from hidden states to logits.
    """

    body: Any
    config: Any
    head: Any

    @classmethod
    def of(cls, node: Any) -> "TextModel":
        """Return the language model of a node: of a class for text, or inside one for images and text."""
        model = getattr(node, "model", None)
        body = getattr(node, "text_model", None) or getattr(model, "model", None)
        head = getattr(node, "lm_head", None) or getattr(model, "lm_head", None)
        return cls(body=body, config=getattr(body, "config", None), head=head)

    @property
    def name(self) -> str:
        """The name of the body's class."""
        return type(self.body).__name__


def unknown_in(node: Any) -> str:
    """Return the first unsupported feature of a node; empty if there is none."""
    text = TextModel.of(node)
    if text.name not in _WINDOWS:
        return str(node.architecture)
    checks = {
        f"the activation {text.config.hidden_act}": text.config.hidden_act == "silu",
        "biases in its MLP": not getattr(text.config, "mlp_bias", False),
        "angles for a part of a head": getattr(text.config, "partial_rotary_factor", None) in (1.0, None),
        "a head with biases": getattr(text.head, "bias", None) is None,
    }
    return first_unknown(checks)


def first_unknown(checks: dict[str, bool]) -> str:
    """Return the name of the first check that is False; empty if all are True."""
    return next((what for what, is_known in checks.items() if not is_known), "")


def window_of(body: str, attention: Any) -> int | None:
    """Return the sliding window of an attention layer in tokens, its own included; None is no window.

    The class decides, not the configuration: a Llama has no window even if its file has a `sliding_window`.

    Args:
        body: the class of the body (`TextModel.name`).
        attention: the module of the layer.
    """
    return _WINDOWS[body](attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplicedInputs:
    """Embeddings of T tokens, and rows that are added to the states of N of them after the first layers.

    Attributes:
        embeds: (T, hidden).
        at: (N,) int64, the tokens with rows.
        added: (N, layers * hidden): for each of the first layers, the row that is added after it.
    """

    embeds: torch.Tensor
    at: torch.Tensor
    added: torch.Tensor

    def rows_after(self, layer: int) -> torch.Tensor | None:
        """Return the rows that are added after a layer, (N, hidden); None after the last of them."""
        width = self.embeds.shape[1]
        found = self.added[:, layer * width : (layer + 1) * width]
        return found if found.shape[1] else None


Inputs: TypeAlias = torch.Tensor | SplicedInputs
"""The inputs of a Llama-like node: (T,) token ids, (T, hidden) embeddings, or embeddings with added rows."""


class LlamaLike:
    """Base of the nodes whose layers our kernels compute: the attributes of the original node."""

    def __init__(self, node: Any, kernels: str) -> None:
        text = TextModel.of(node)
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
        self.position_axes: Final = position_axes_of(node)
        self.embed_width: Final = embed_width_of(node)
        self.programs: Final = programs_of(node)
        self.token_programs: Final = token_programs_of(node)
        self.towers: Final = towers_of(node)
        self.masks: Final = masks_of(node)
        self._hidden: Final[int] = text.config.hidden_size
        self._embed: Final = text.body.embed_tokens
        self._angles: Final = text.body.rotary_emb

    def use_attention(self, name: str) -> None:
        """See `workers.kv_engine.node.Backbone`."""
        self._node.use_attention(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the ids: `forward` embeds them."""
        return token_ids

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, float]:
        """See `workers.kv_engine.node.Backbone`."""
        found: tuple[torch.Tensor, float] = self._node.positions(prompt_ids, parts)
        return found

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> Inputs:
        """Return the embeddings of the tokens, (T,), of which those at `at`, (N,), are `rows`, (N, width).

        A row is an embedding, followed by the rows that are added after the first layers.
        """
        embeds: torch.Tensor = self._embed(token_ids).index_copy(
            0, at, rows[:, : self._hidden].to(self.dtype)
        )
        if rows.shape[1] == self._hidden:
            return embeds
        return SplicedInputs(embeds=embeds, at=at, added=rows[:, self._hidden :])

    def _angles_of(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of (T, dim) for positions of (T,) or (axes, T), in the dtype of the states."""
        cos, sin = self._angles(states[None], positions.unsqueeze(-2))
        if cos.shape[-1] < self.layout.head_dim:  # of half a head, in gpt-oss
            cos, sin = (torch.cat([angles, angles], -1) for angles in (cos, sin))
        return cos[0].contiguous(), sin[0].contiguous()
