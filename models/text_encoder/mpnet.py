"""MPNet over packed texts: its attention has relative positions, and does not use transformers' interface."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from models.text_encoder.attention import Run, divided, packed_attention, positions_of, runs_of


def is_mpnet(model: Any) -> bool:
    """Return true for a model whose backbone is transformers' MPNetModel."""
    return any(base.__name__ == "MPNetModel" for base in type(model.base_model).__mro__)


class PackedMPNet:
    """A forward of MPNet over one row with all texts (`models.text_encoder.packed.Forward`)."""

    def __init__(self, model: Any) -> None:
        self._model = model.base_model

    @torch.inference_mode()
    def __call__(
        self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None
    ) -> Sequence[torch.Tensor]:
        model, lengths = self._model, [len(text) for text in texts]
        ids = torch.tensor([[id for text in texts for id in text]], device=model.device)
        positions = positions_of(model, ids, lengths)
        states: torch.Tensor = model.embeddings(input_ids=ids, position_ids=positions)
        longest = states.new_empty(1, max(lengths), 0)
        attend = partial(
            _attend, runs=runs_of(lengths), bias=model.encoder.compute_position_bias(longest).to(states.dtype)
        )
        for layer in model.encoder.layer:
            attended = layer.attention.LayerNorm(attend(layer.attention.attn, states) + states)
            states = layer.output(layer.intermediate(attended), attended)
        return divided(states[0], lengths)


def _attend(attention: Any, states: torch.Tensor, *, runs: Sequence[Run], bias: torch.Tensor) -> torch.Tensor:
    """The self-attention of a layer: states (1, T, hidden) -> (1, T, hidden)."""
    shape = (*states.shape[:-1], -1, attention.attention_head_size)
    query, key, value = (
        matrix(states).view(shape).transpose(1, 2) for matrix in (attention.q, attention.k, attention.v)
    )
    found, _ = packed_attention(attention, query, key, value, None, runs=runs, bias=bias)
    output: torch.Tensor = attention.o(found.flatten(2))
    return output
