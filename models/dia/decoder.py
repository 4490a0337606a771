"""Dia's decoder over the KV pool: rotary positions, grouped queries, a sum of embeddings for each frame."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers.models.dia.modeling_dia import apply_rotary_pos_emb

from models.checkpoints.files import CheckpointError
from models.programs import Program
from models.speech_to_text.frames_decoder import FramesDecoder, TwoAttentions

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, each (1, N, dim)."""


class DiaDecoder(FramesDecoder):
    """A node of the KV engine.

    The cells of a text and of its frames have one shape. So the keys and values of the self-attention are
    stored for each head of the cross-attention, which has no groups of queries in the published checkpoint.

    Args:
        model: transformers' `DiaForConditionalGeneration` without its encoder.
        programs: by name.
        max_positions: the longest sequence.

    Attributes:
        codes: the number of codes in a channel; as a token of the engine, a code is in all channels.

    Raises:
        CheckpointError: the shapes of both attentions cannot share a pool.
    """

    def __init__(self, model: Any, programs: Mapping[str, Program], *, max_positions: int) -> None:
        config = model.config.decoder_config
        heads, dim = config.cross_num_key_value_heads, config.cross_head_dim
        if (config.num_attention_heads % heads, heads % config.num_key_value_heads, config.head_dim) != (
            0,
            0,
            dim,
        ):
            raise CheckpointError(
                "decoder_config: expected cross-attention with the head_dim of the self-attention, and a "
                f"number of key heads between its key heads and its heads, found {heads} of {dim} beside "
                f"{config.num_key_value_heads} to {config.num_attention_heads} of {config.head_dim}"
            )
        if config.cross_hidden_size > config.hidden_size:
            raise CheckpointError(
                f"decoder_config: expected a cross_hidden_size of at most {config.hidden_size}, found "
                f"{config.cross_hidden_size}"
            )
        super().__init__(
            model,
            programs,
            heads=heads,
            head_dim=dim,
            positions=config.max_position_embeddings,
            max_positions=max_positions,
        )
        self._config = config
        self.codes: Final[int] = config.vocab_size

    @property
    def embed_width(self) -> int:
        return int(self._config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return self.codes * int(self._config.num_channels)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.rows_of(self._in_all_channels(token_ids))

    def rows_of(self, codes: torch.Tensor) -> torch.Tensor:
        """The embeddings of frames: (N, channels) to (N, hidden)."""
        rows: torch.Tensor = self._body.embeddings(codes[None].to(self.device))[0]
        return rows

    def frames_of(self, states: torch.Tensor) -> torch.Tensor:
        """The encoder's states, (F, cross hidden), in rows as wide as those of tokens."""
        rows = torch.zeros(len(states), self.embed_width, device=self.device, dtype=self.dtype)
        rows[:, : states.shape[1]] = states
        return rows

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.logits_dense(hidden.index_select(0, indices))
        return logits.float()

    def _states(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        encoded: torch.Tensor,
        attention: TwoAttentions,
    ) -> torch.Tensor:
        rotation = self._body.rotary_emb(embeds, position_ids=positions[None])
        encoded, states = encoded[:, : self._config.cross_hidden_size], embeds
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
        rotation: Rotation,
    ) -> torch.Tensor:
        """One layer: states of the answer, (N, hidden)."""
        own, cross = layer.self_attention, layer.cross_attention
        normed = layer.pre_sa_norm(states)
        query, key = (
            self._heads(project(normed)).transpose(0, 1)[None] for project in (own.q_proj, own.k_proj)
        )
        query, key = (rows[0].transpose(0, 1) for rows in apply_rotary_pos_emb(query, key, *rotation))
        found = attention.own(
            own,
            query,
            (self._in_all_heads(key), self._in_all_heads(self._heads(own.v_proj(normed)))),
            (self._heads(cross.k_proj(encoded)), self._heads(cross.v_proj(encoded))),
            scaling=own.scaling,
        )
        states = states + own.o_proj(found)
        query = self._heads(cross.q_proj(layer.pre_ca_norm(states)))
        states = states + attention.crossed(cross, query, cross.o_proj, scaling=cross.scaling)
        found_states: torch.Tensor = states + layer.mlp(layer.pre_mlp_norm(states))
        return found_states

    def _in_all_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """(N, heads of a group, dim) as (N, heads of the pool, dim)."""
        return rows.repeat_interleave(self.layout.kv_heads // rows.shape[1], dim=1)

    def _in_all_channels(self, token_ids: torch.Tensor) -> torch.Tensor:
        return (token_ids.long() % self.codes)[:, None].expand(-1, self._config.num_channels)

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        # Attention to one frame of zeros is zero: the projections have no biases.
        none = torch.zeros(1, 1, self._config.cross_hidden_size, device=self.device, dtype=self.dtype)
        codes = self._in_all_channels(token_ids)[None]
        states = self._body(input_ids=codes, encoder_hidden_states=none, use_cache=False).last_hidden_state[0]
        return self.head(states, torch.arange(len(states), device=states.device))
