"""BAGEL's language model: Qwen2 with normed queries and keys, and two sets of weights.

A *mixture of transformers*: each token has a route. Text and understood images go through one set of weights
(route 0), latents of drawn images through the other one (route 1, `_moe_gen`). All tokens attend together.
Within the layers, the tokens of route 0 come first, so that each set of weights computes one slice. Norms are
torch's, which compute the same in one kernel on a GPU.

The published code is ByteDance-Seed/Bagel, `modeling/bagel/qwen2_navit.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2MLP,
    Qwen2Model,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

GEN: Final = "_moe_gen"
"""The end of the names of the weights of route 1."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The order of tokens within the layers.

    Attributes:
        order: (T,) the tokens in that order: those of route 0, then those of route 1.
        back: (T,) the place of each token in it.
        first: the number of tokens of route 0.
    """

    order: torch.Tensor
    back: torch.Tensor
    first: int

    @classmethod
    def of(cls, routes: torch.Tensor | None) -> Self | None:
        """The order of tokens of these routes, (T,); None if all of them have route 0."""
        if routes is None or not (generated := int((routes != 0).sum())):
            return None
        order = torch.argsort(routes, stable=True)
        return cls(order, torch.argsort(order), len(routes) - generated)


def by_route(module: nn.Module, name: str, routing: Routing | None, tokens: torch.Tensor) -> torch.Tensor:
    """Compute tokens, (1, T, ...) in the order of their routes, by the two members of that name."""
    understand: Callable[[torch.Tensor], torch.Tensor] = getattr(module, name)
    if routing is None:
        return understand(tokens)
    draw: Callable[[torch.Tensor], torch.Tensor] = getattr(module, name + GEN)
    if not routing.first:
        return draw(tokens)
    return torch.cat([understand(tokens[:, : routing.first]), draw(tokens[:, routing.first :])], dim=1)


class MoTAttention(Qwen2Attention):  # type: ignore[misc] # transformers has no types
    """Attention of all tokens together; its projections and norms by route."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        hidden, heads = config.hidden_size, config.num_attention_heads * self.head_dim
        kv_heads = config.num_key_value_heads * self.head_dim
        self.q_proj_moe_gen = nn.Linear(hidden, heads)
        self.k_proj_moe_gen = nn.Linear(hidden, kv_heads)
        self.v_proj_moe_gen = nn.Linear(hidden, kv_heads)
        self.o_proj_moe_gen = nn.Linear(heads, hidden, bias=False)
        for name in ("q_norm", "k_norm"):
            for end in ("", GEN):
                self.add_module(name + end, nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        routing: Routing | None,
    ) -> torch.Tensor:
        """(1, T, hidden) to (1, T, hidden), both in the order of the routes."""
        queries, keys = (
            by_route(self, norm, routing, self._heads(name, routing, hidden_states))
            for name, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm"))
        )
        values = self._heads("v_proj", routing, hidden_states)
        if routing is not None:
            queries, keys, values = (one.index_select(1, routing.back) for one in (queries, keys, values))
        queries, keys, values = (one.transpose(1, 2) for one in (queries, keys, values))
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation,  # noqa: SLF001 - no public reader
            eager_attention_forward,
        )
        seen, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
        )
        seen = seen.reshape(*hidden_states.shape[:-1], -1).contiguous()
        if routing is not None:
            seen = seen.index_select(1, routing.order)
        return by_route(self, "o_proj", routing, seen)

    def _heads(self, name: str, routing: Routing | None, tokens: torch.Tensor) -> torch.Tensor:
        """A projection of tokens, (1, T, heads, head_dim)."""
        found = by_route(self, name, routing, tokens)
        return found.view(*found.shape[:-1], -1, self.head_dim)


class MoTLayer(Qwen2DecoderLayer):  # type: ignore[misc] # transformers has no types
    """A layer whose weights are chosen by route."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = MoTAttention(config, layer_idx)
        self.mlp_moe_gen = Qwen2MLP(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            for end in ("", GEN):
                self.add_module(name + end, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        routing: Routing | None,
    ) -> torch.Tensor:
        """(1, T, hidden) to (1, T, hidden), both in the order of the routes."""
        normed = by_route(self, "input_layernorm", routing, hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, position_embeddings, attention_mask, routing)
        normed = by_route(self, "post_attention_layernorm", routing, hidden_states)
        return hidden_states + by_route(self, "mlp", routing, normed)


class MoTModel(Qwen2Model):  # type: ignore[misc] # transformers has no types
    """The body of the language model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(MoTLayer(config, index) for index in range(config.num_hidden_layers))
        for name in ("norm", "norm_moe_gen"):
            self.add_module(name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        use_cache: bool | None = None,
        routes: torch.Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Compute one packed batch, (1, T); `routes` (T,) are those of its tokens, all 0 by default."""
        assert not use_cache, "the pool is the cache"
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        positions = self.rotary_emb(hidden, position_ids)
        routing = Routing.of(routes)
        if routing is not None:
            hidden = hidden.index_select(1, routing.order)
        for layer in self.layers:
            hidden = layer(hidden, mask, positions, routing)
        hidden = by_route(self, "norm", routing, hidden)
        if routing is not None:
            hidden = hidden.index_select(1, routing.back)
        return BaseModelOutputWithPast(last_hidden_state=hidden)
