"""Whisper's decoder as a KV node. Its sequences begin with the encoder's frames, then comes the text.

A pass of frames (`FRAME_ROUTE`) brings the encoder's states. Each layer makes of them the keys and values of
its cross-attention, which stay in the cells of the frames (`workers.kv_engine.attention.encoder_cells`). So
they are computed once for a window: for its language, its text and each further attempt at it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers import AttentionInterface

from models.base import KVLayout, TokenStep
from models.programs import FRAME_ROUTE, FRAMES_SUFFIX, Program
from models.whisper.graph import MAX_POSITIONS

NAME: Final = "decoder"


class WhisperDecoder:
    """A node of the KV engine (`workers.kv_engine.node.KVNode`, with the documentation of all members).

    Args:
        model: transformers' `WhisperForConditionalGeneration` without its encoder.
        programs: by name.
    """

    embed_width: int

    def __init__(self, model: Any, programs: Mapping[str, Program]) -> None:
        config = model.config
        heads = int(config.decoder_attention_heads)
        self.name: Final = NAME
        self.architecture: Final = type(model).__name__
        self.kernels: Final = "torch"
        self.programs: Final = programs
        self.frames: Final = int(config.max_source_positions)
        self.max_positions: Final = max(self.frames + int(config.max_target_positions), MAX_POSITIONS)
        self.layout: Final = KVLayout(
            layers=int(config.decoder_layers), kv_heads=heads, head_dim=int(config.d_model) // heads
        )
        self.embed_width = int(config.d_model)
        self._model = model
        self._body = model.model.decoder
        self._attends: Any = None
        self._attends_to_frames: Any = None

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def use_attention(self, name: str) -> None:
        self._attends = AttentionInterface()[name]
        self._attends_to_frames = AttentionInterface()[name + FRAMES_SUFFIX]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self._body.embed_tokens(token_ids)
        return embeds

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens, of which those at `at` are `rows`."""
        return self.embed(token_ids).index_copy(0, at, rows.to(self.dtype))

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The states of the text's tokens after the last norm, (T, hidden); zeros for frames."""
        text, frames = _parts(step)
        # The self-check asks for positions that no text has.
        positions = step.positions[text].clamp(0, self._model.config.max_target_positions - 1)
        states = inputs[text] + self._body.embed_positions.weight[positions]
        encoded = inputs[frames]
        for layer in self._body.layers:
            states = self._layer(layer, states, encoded, text, frames, len(inputs))
        hidden = torch.zeros_like(inputs)
        hidden[text] = self._body.layer_norm(states)
        return hidden

    def _layer(
        self, layer: Any, states: torch.Tensor, encoded: torch.Tensor, text: Any, frames: Any, tokens: int
    ) -> torch.Tensor:
        """One layer: states of the text, (N, hidden). Of frames, `encoded`, only keys and values."""
        own, cross = layer.self_attn, layer.encoder_attn
        normed = layer.self_attn_layer_norm(states)
        keys, values = (states.new_zeros(tokens, self.embed_width) for _ in range(2))
        keys[text], values[text] = own.k_proj(normed), own.v_proj(normed)
        keys[frames], values[frames] = cross.k_proj(encoded), cross.v_proj(encoded)
        query = self._query(own, normed, text, tokens)
        found, _ = self._attends(
            own, query, self._heads(keys), self._heads(values), None, scaling=1.0, after_frames=True
        )
        states = states + own.out_proj(found[0][text].flatten(1))
        query = self._query(cross, layer.encoder_attn_layer_norm(states), text, tokens)
        found, _ = self._attends_to_frames(cross, query, scaling=1.0)
        heard = found[0][text].flatten(1)
        # A text without frames, as the self-check has it, skips the cross-attention with its bias.
        states = states + torch.where(heard.any(1, keepdim=True), cross.out_proj(heard), 0.0)
        wide = layer.activation_fn(layer.fc1(layer.final_layer_norm(states)))
        found_states: torch.Tensor = states + layer.fc2(wide)
        return found_states

    def _query(self, attention: Any, normed: torch.Tensor, text: Any, tokens: int) -> torch.Tensor:
        """The scaled queries of the text in their places, (1, heads, T, head_dim)."""
        queries = normed.new_zeros(tokens, self.embed_width)
        queries[text] = attention.q_proj(normed) * attention.scaling
        return self._heads(queries)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), self.layout.kv_heads, -1).transpose(0, 1)[None]

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.proj_out(hidden.index_select(0, indices))
        return logits.float()

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        states = self._body(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
        return self.head(states, torch.arange(len(states), device=states.device))

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


def _parts(step: TokenStep) -> tuple[Any, Any]:
    """The indices of a step's tokens: of text, and of frames. Slices where all are text."""
    if step.routes is None:
        return slice(None), slice(0, 0)
    is_frame = step.routes == FRAME_ROUTE
    return (~is_frame).nonzero().flatten(), is_frame.nonzero().flatten()
