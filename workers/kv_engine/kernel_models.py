"""The models that our own CPU and GPU kernels support: decoders built like Llama, by their class.

    states += o(attend(norm(states)))            queries and keys are rotated to their positions; Qwen3 norms
    states += down(silu(gate) * up), of norm     them by head, Qwen2 adds biases
    states += rows                               after the first layers, for the images of Qwen3-VL

A `Kind` says how a class differs from this: in its norms, which results may have, too, its angles, its
activation, and factors and limits in its config. In place of the one MLP of a layer, a router may choose a
few of many. GPU kernels know neither experts nor what `Kind.is_on_gpu` excludes.

The language model inside a vision-language class is one of them, too: its body decides, not the class around
it. Each kind of kernel has further requirements (`workers.cpu_kernels.decoder`,
`workers.kv_engine.gpu.decoder`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch

from models.base import KVLayout, TokenStep
from models.sequence_request import PromptPart
from models.transformers_lm.expert_layers import mlp_in
from workers.kv_engine.node import (
    embed_width_of,
    full_ignores_window_of,
    masks_of,
    position_axes_of,
    position_dtype_of,
    programs_of,
    rotary_change_of,
    token_programs_of,
    towers_of,
)


def _own_window(attention: Any) -> int | None:
    window: int | None = getattr(attention, "sliding_window", None)
    return window


def _window_of_all(attention: Any) -> int | None:
    window: int | None = attention.config.sliding_window
    return window


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """The names of a layer's norms: of what attention and the MLP read, and of their results."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A class of bodies: how its layers differ from Llama's.

    Attributes:
        window: the sliding window of an attention layer in tokens, its own included; None is no window. The
            class decides, not the configuration: a Llama has no window even if its file has a
            `sliding_window`.
        angles: the name of an attention layer's set of angles, if there are several; None if its queries and
            keys have no positions.
        norms: see `NormNames`.
        norm_offset: what is added to the weights of norms.
        norms_whole_heads: one norm is that of all heads of queries, one that of keys.
        activation: the name in the config of the activation of MLPs.
        options: the names of further numbers in the config that it uses.
        turns_neighbours: angles turn neighbouring numbers of a head against each other, not its halves.
        has_half_angles: the angles are those of half a head, the same for the other half.
        has_experts: layers may have experts (transformers' `experts` and their router).
        is_on_gpu: the GPU kernels know it, too.
    """

    window: Callable[[Any], int | None] = lambda _: None
    angles: Callable[[Any], str | None] = lambda _: ""
    norms: NormNames = NormNames()
    norm_offset: float = 0.0
    norms_whole_heads: bool = False
    activation: str = "hidden_act"
    options: frozenset[str] = frozenset()
    turns_neighbours: bool = False
    has_half_angles: bool = False
    has_experts: bool = False
    is_on_gpu: bool = False


_LLAMA: Final = Kind(is_on_gpu=True)
_WINDOWED: Final = Kind(window=_own_window, is_on_gpu=True)
_EXPERTS: Final = Kind(window=_own_window, has_experts=True)
_GEMMA: Final = Kind(
    window=_own_window,
    norms=NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    activation="hidden_activation",
    options=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
)
_OLMO: Final = Kind(
    norms=NormNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    norms_whole_heads=True,
)
_NEIGHBOURS: Final = Kind(turns_neighbours=True)
_KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "LlamaModel": _LLAMA,
        "MistralModel": replace(_LLAMA, window=_window_of_all),
        "Qwen2Model": _WINDOWED,
        "Qwen2_5_VLTextModel": _WINDOWED,
        "Qwen3Model": _WINDOWED,
        "Qwen3VLTextModel": _LLAMA,
        "MixtralModel": replace(_EXPERTS, window=_window_of_all),
        "Qwen2MoeModel": _EXPERTS,
        "Qwen3MoeModel": _EXPERTS,
        "Qwen3VLMoeTextModel": replace(_EXPERTS, window=lambda _: None),
        "Glm4MoeModel": Kind(has_experts=True),
        "Dots1Model": _EXPERTS,
        "Ernie4_5_MoeModel": Kind(turns_neighbours=True, has_experts=True),
        "GptOssModel": replace(_EXPERTS, has_half_angles=True),
        "GemmaModel": Kind(norm_offset=1.0),
        "Gemma2Model": _GEMMA,
        "Gemma3TextModel": replace(
            _GEMMA,
            angles=lambda attention: str(attention.layer_type),
            options=frozenset({"final_logit_softcapping"}),
        ),
        "GraniteModel": Kind(
            options=frozenset({"embedding_multiplier", "residual_multiplier", "logits_scaling"})
        ),
        "Olmo2Model": _OLMO,
        "Olmo3Model": replace(
            _OLMO, window=_own_window, angles=lambda attention: str(attention.attention_type)
        ),
        "Phi3Model": Kind(window=_window_of_all),
        "GlmModel": _NEIGHBOURS,
        "Glm4Model": replace(
            _NEIGHBOURS,
            norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        ),
        "Ernie4_5Model": _NEIGHBOURS,
        "HeliumModel": _NEIGHBOURS,
        "SeedOssModel": Kind(),
        "Exaone4Model": replace(
            _OLMO,
            norms_whole_heads=False,
            window=lambda attention: attention.sliding_window if attention.is_sliding else None,
            angles=lambda attention: "" if attention.is_sliding or attention.sliding_window is None else None,
        ),
        "OlmoeModel": Kind(norms_whole_heads=True, has_experts=True),
        "SmolLM3Model": Kind(window=_own_window, angles=lambda attention: "" if attention.use_rope else None),
    }
)
"""The supported bodies."""


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
    def kind(self) -> Kind | None:
        """None if the kernels do not know the body's class."""
        return _KINDS.get(type(self.body).__name__)

    @property
    def activation(self) -> str:
        """Transformers' name of the activation of MLPs."""
        assert self.kind is not None
        return str(getattr(self.config, self.kind.activation))

    def option(self, name: str, default: float) -> float:
        """Return a number of the config, or the default if this kind of body does not use it."""
        assert self.kind is not None
        found = getattr(self.config, name, None) if name in self.kind.options else None
        return default if found is None else float(found)


def unknown_in(node: Any) -> str:
    """Return the first unsupported feature of a node; empty if there is none."""
    text = TextModel.of(node)
    if text.kind is None:
        return str(node.architecture)
    mlps = [mlp for layer in text.body.layers if (mlp := mlp_in(layer)) is not None]
    checks = {
        "biases in its MLP": all(getattr(mlp.down_proj, "bias", None) is None for mlp in mlps),
        "clipped queries and keys": getattr(text.config, "clip_qkv", None) is None,
        "a head with biases": getattr(text.head, "bias", None) is None,
        "several sets of weights": not hasattr(node, "routes"),
    }
    return first_unknown(checks)


def first_unknown(checks: dict[str, bool]) -> str:
    """Return the name of the first check that is False; empty if all are True."""
    return next((what for what, is_known in checks.items() if not is_known), "")


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
        assert text.kind is not None, "`unknown_in` was asked before"
        self._kind: Final = text.kind
        self._node: Final = node
        self.kernels: Final = kernels
        self.name: Final[str] = node.name
        self.architecture: Final[str] = node.architecture
        self.layout: KVLayout = node.layout
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
        self.rotary_change: Final = rotary_change_of(node)
        self.full_ignores_window: Final = full_ignores_window_of(node)
        self.fractional_positions: Final = position_dtype_of(node).is_floating_point
        self.text_model: Final = text.body  # programs embed their texts with it
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

    def _angles_of(
        self, states: torch.Tensor, step: TokenStep, name: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the positions of a step, (T, dim or less), in the dtype of the states.

        Args:
            states: (T, hidden).
            step: its positions are (T,) or (axes, T).
            name: of the set of angles (`Kind.angles`).
        """
        chosen = nullcontext() if self.rotary_change is None else self._node.choosing_factors(step)
        with chosen:
            cos, sin = self._angles(states[None], step.positions.unsqueeze(-2), *([name] if name else []))
        if self._kind.has_half_angles:
            cos, sin = (torch.cat([angles, angles], -1) for angles in (cos, sin))
        return cos[0].contiguous(), sin[0].contiguous()
