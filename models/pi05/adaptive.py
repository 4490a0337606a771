"""Gemma with adaptive norms (adaRMS): scale, shift and gate of each norm depend on a condition.

    norm      x / rms(x) * (1 + scale) + shift
    residual  x + gate * f(norm(x))

Attention and MLP are transformers' own.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import (
    GemmaAttention,
    GemmaMLP,
    GemmaPreTrainedModel,
    GemmaRotaryEmbedding,
)


class AdaptiveNorm(nn.Module):
    """An RMS norm whose scale and shift, and the gate of the residual, are a projection of a condition.

    `dense` has as many inputs as the condition, and three times the hidden size as outputs. Conditions, and
    what it makes of them, are float32. With zeros this is Gemma's norm at the beginning of its training.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, hidden: torch.Tensor, modulation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalized states and the gate, (T, hidden) each.

        Args:
            hidden: (T, hidden).
            modulation: (T, 3 x hidden), what `dense` makes of the tokens' conditions.
        """
        scale, shift, gate = modulation.chunk(3, dim=-1)
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + scale.float()) + shift.float()).to(hidden.dtype), gate.to(hidden.dtype)


class AdaptiveLayer(nn.Module):
    """A layer of Gemma with two adaptive norms."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(config=config, layer_idx=layer_idx)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, condition: torch.Tensor, token: torch.Tensor, **attention: Any
    ) -> torch.Tensor:
        """The states of the tokens after the layer, (1, T, hidden); see `AdaptiveGemma.forward`."""
        normed, gate = self.input_layernorm(hidden, self.input_layernorm.dense(condition)[token])
        attended, _ = self.self_attn(hidden_states=normed, **attention)
        hidden = hidden + attended * gate
        norm = self.post_attention_layernorm
        normed, gate = norm(hidden, norm.dense(condition)[token])
        found: torch.Tensor = hidden + self.mlp(normed) * gate
        return found


class AdaptiveGemma(GemmaPreTrainedModel):  # type: ignore[misc] # transformers has no types
    """The layers of an expert with adaptive norms. It has no embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(AdaptiveLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GemmaRotaryEmbedding(config=config)
        self.post_init()

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        condition: torch.Tensor,
        token: torch.Tensor,
    ) -> torch.Tensor:
        """The states after the last norm, (T, hidden).

        Args:
            inputs_embeds: (1, T, hidden).
            position_ids: (1, T).
            attention_mask: what the attention function takes.
            condition: (n, hidden), the n conditions that occur.
            token: (T,), the condition of each token.
        """
        hidden = inputs_embeds
        attention = {
            "position_embeddings": self.rotary_emb(hidden, position_ids=position_ids),
            "attention_mask": attention_mask,
        }
        for layer in self.layers:
            hidden = layer(hidden, condition, token, **attention)
        normed, _ = self.norm(hidden, self.norm.dense(condition)[token])
        found: torch.Tensor = normed[0]
        return found
