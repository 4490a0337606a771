"""Whisper's decoder over the KV pool, and its weights of attention."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from models.programs import Program
from models.speech_to_text.frames_decoder import FramesDecoder, TwoAttentions
from models.whisper.graph import MAX_POSITIONS


class WhisperDecoder(FramesDecoder):
    """A node of the KV engine.

    Args:
        model: transformers' `WhisperForConditionalGeneration` without its encoder.
        programs: by name.
    """

    def __init__(self, model: Any, programs: Mapping[str, Program]) -> None:
        config = model.config
        heads, positions = int(config.decoder_attention_heads), int(config.max_target_positions)
        super().__init__(
            model,
            programs,
            heads=heads,
            head_dim=int(config.d_model) // heads,
            positions=positions,
            max_positions=max(int(config.max_source_positions) + positions, MAX_POSITIONS),
        )

    def _states(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        encoded: torch.Tensor,
        attention: TwoAttentions,
    ) -> torch.Tensor:
        states = embeds + self._body.embed_positions.weight[positions]
        for layer in self._body.layers:
            states = self._layer(layer, states, encoded, attention)
        found: torch.Tensor = self._body.layer_norm(states)
        return found

    def _layer(
        self, layer: Any, states: torch.Tensor, encoded: torch.Tensor, attention: TwoAttentions
    ) -> torch.Tensor:
        """One layer: states of the text, (N, hidden)."""
        own, cross = layer.self_attn, layer.encoder_attn
        normed = layer.self_attn_layer_norm(states)
        found = attention.own(
            own,
            self._query(own, normed),
            (self._heads(own.k_proj(normed)), self._heads(own.v_proj(normed))),
            (self._heads(cross.k_proj(encoded)), self._heads(cross.v_proj(encoded))),
            scaling=1.0,
        )
        states = states + own.out_proj(found)
        query = self._query(cross, layer.encoder_attn_layer_norm(states))
        states = states + attention.crossed(cross, query, cross.out_proj, scaling=1.0)
        wide = layer.activation_fn(layer.fc1(layer.final_layer_norm(states)))
        found_states: torch.Tensor = states + layer.fc2(wide)
        return found_states

    def _query(self, attention: Any, normed: torch.Tensor) -> torch.Tensor:
        """The scaled queries of the text, (N, heads, dim)."""
        return self._heads(attention.q_proj(normed) * attention.scaling)

    @torch.inference_mode()
    def attention_to_frames(
        self, ids: Sequence[int], encoded: torch.Tensor, heads: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """The weights of some heads of the cross-attention, (heads, tokens, frames) float32.

        The stock modules compute them in one pass over a finished text: attention over the pool gives no
        weights.

        Args:
            ids: the tokens of the text.
            encoded: the encoder's states, (frames, hidden).
            heads: layers, and heads in them.
        """
        config = self._body.config
        served = config._attn_implementation  # noqa: SLF001 - no public reader
        self._body.set_attn_implementation("eager")
        try:
            found = self._body(
                input_ids=torch.tensor([list(ids)], device=self.device),
                encoder_hidden_states=encoded[None].to(self.dtype),
                use_cache=False,
                output_attentions=True,
            )
        finally:
            self._body.set_attn_implementation(served)
        return torch.stack([found.cross_attentions[layer][0, head] for layer, head in heads]).float()
