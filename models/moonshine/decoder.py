"""Moonshine's decoder over the KV pool: rotary positions, a gate in each MLP, no biases in its attention."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.moonshine.modeling_moonshine import apply_rotary_pos_emb

from models.programs import Program
from models.speech_to_text.frames_decoder import FramesDecoder, TwoAttentions

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, each (1, N, dim)."""


class MoonshineDecoder(FramesDecoder):
    """A node of the KV engine.

    Args:
        model: transformers' `MoonshineForConditionalGeneration` without its encoder.
        programs: by name.
        heads: of keys.
        positions: the most tokens of a text.
        max_positions: the longest sequence.
    """

    def __init__(
        self, model: Any, programs: Mapping[str, Program], *, heads: int, positions: int, max_positions: int
    ) -> None:
        super().__init__(
            model,
            programs,
            heads=heads,
            head_dim=int(model.model.decoder.layers[0].self_attn.head_dim),
            positions=positions,
            max_positions=max_positions,
        )

    def _states(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        encoded: torch.Tensor,
        attention: TwoAttentions,
    ) -> torch.Tensor:
        rotation = self._body.rotary_emb(embeds[None], position_ids=positions[None])
        return self._layers(embeds, encoded, attention, rotation)

    def _layers(
        self,
        states: torch.Tensor,
        encoded: torch.Tensor,
        attention: TwoAttentions,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """All layers and the last norm. `rotation` turns queries and keys of the text."""
        for layer in self._body.layers:
            states = self._layer(layer, states, encoded, attention, rotation)
        found: torch.Tensor = self._body.norm(states)
        return found

    def _layer(
        self,
        layer: Any,
        states: torch.Tensor,
        encoded: torch.Tensor,
        attention: TwoAttentions,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """One layer: states of the text, (N, hidden)."""
        own, cross = layer.self_attn, layer.encoder_attn
        normed = layer.input_layernorm(states)
        query, key = (self._heads(project(normed)) for project in (own.q_proj, own.k_proj))
        if rotation is not None:
            query, key = _rotated(query, key, rotation)
        found = attention.own(
            own,
            query,
            (key, self._heads(own.v_proj(normed))),
            (self._heads(cross.k_proj(encoded)), self._heads(cross.v_proj(encoded))),
            scaling=own.scaling,
        )
        states = states + own.o_proj(found)
        query = self._heads(cross.q_proj(layer.post_attention_layernorm(states)))
        states = states + attention.crossed(cross, query, cross.o_proj, scaling=cross.scaling)
        found_states: torch.Tensor = states + layer.mlp(layer.final_layernorm(states))
        return found_states


class StreamingDecoder(MoonshineDecoder):
    """The decoder of the streaming version: it adds positions to its encoder's frames."""

    def frames_of(self, states: torch.Tensor) -> torch.Tensor:
        positions = self._body.pos_emb.weight[: len(states)]
        frames: torch.Tensor = self._body.proj(states.to(self.dtype) + positions)
        return frames

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        # The stock decoder needs an encoder's states; none is no attention to them.
        none = torch.zeros(1, 0, self._body.pos_emb.embedding_dim, device=self.device, dtype=self.dtype)
        found = self._body(input_ids=token_ids[None], encoder_hidden_states=none, use_cache=False)
        states = found.last_hidden_state[0]
        return self.head(states, torch.arange(len(states), device=states.device))


def _rotated(query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, each (N, heads, dim), turned by their positions."""
    turned = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *rotation)
    query, key = (rows[0].transpose(0, 1) for rows in turned)
    return query, key
