"""The decoder of an encoder-decoder model as a KV node. Its sequences begin with frames, then comes the text.

A pass of frames (`FRAME_ROUTE`) brings the encoder's states. Each layer makes of them the keys and values of
its cross-attention, which stay in the cells of the frames (`workers.kv_engine.attention.encoder_cells`). So
they are computed once for a window, for all its tokens and each attempt at its text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from transformers import AttentionInterface

from models.base import KVLayout, TokenStep
from models.programs import FRAME_ROUTE, FRAMES_SUFFIX, Program

NAME: Final = "decoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoAttentions:
    """The tokens of a step, N of text and F of frames among T, and their two attentions over the pool.

    Attributes:
        text, frames: the indices of each kind: slices where all are text.
        tokens: T.
    """

    text: Any
    frames: Any
    tokens: int
    attend: Any
    attend_to_frames: Any

    @classmethod
    def of(cls, step: TokenStep, tokens: int, attend: Any, attend_to_frames: Any) -> Self:
        """Of a step with `tokens` tokens."""
        text: Any = slice(None)
        frames: Any = slice(0, 0)
        if step.routes is not None:
            is_frame = step.routes == FRAME_ROUTE
            text, frames = (~is_frame).nonzero().flatten(), is_frame.nonzero().flatten()
        return cls(text=text, frames=frames, tokens=tokens, attend=attend, attend_to_frames=attend_to_frames)

    def own(
        self,
        module: Any,
        query: torch.Tensor,
        cells: tuple[torch.Tensor, torch.Tensor],
        frame_cells: tuple[torch.Tensor, torch.Tensor],
        *,
        scaling: float,
    ) -> torch.Tensor:
        """Write a layer's keys and values; return the attention of the text to itself, (N, heads * dim).

        Args:
            module: the attention, with its `layer_idx`.
            query: of the text, (N, heads, dim).
            cells: keys and values of the text, each (N, heads, dim).
            frame_cells: those of the frames for the cross-attention, each (F, heads, dim).
            scaling: factor of the products of queries and keys.
        """
        keys, values = (self._placed(*pair) for pair in zip(cells, frame_cells, strict=True))
        found, _ = self.attend(
            module, self._placed(query), keys, values, None, scaling=scaling, after_frames=True
        )
        return self._of_text(found)

    def crossed(
        self,
        module: Any,
        query: torch.Tensor,
        project: Callable[[torch.Tensor], torch.Tensor],
        *,
        scaling: float,
    ) -> torch.Tensor:
        """The projected attention of the text to its frames, (N, hidden).

        Zeros for a text without frames, as the self-check has it, whatever the bias of the projection.
        """
        found, _ = self.attend_to_frames(module, self._placed(query), scaling=scaling)
        heard = self._of_text(found)
        return torch.where(heard.any(1, keepdim=True), project(heard), 0.0)

    def _placed(self, rows: torch.Tensor, frame_rows: torch.Tensor | None = None) -> torch.Tensor:
        """The rows in their places in the step, (1, heads, T, dim); zeros elsewhere."""
        placed = rows.new_zeros(self.tokens, *rows.shape[1:])
        placed[self.text] = rows
        if frame_rows is not None:
            placed[self.frames] = frame_rows
        return placed.transpose(0, 1)[None]

    def _of_text(self, found: torch.Tensor) -> torch.Tensor:
        return found[0][self.text].flatten(1)


class FramesDecoder(ABC):
    """A node of the KV engine (`workers.kv_engine.node.KVNode`, with the documentation of all members).

    Args:
        model: transformers' class with a head `proj_out` and a decoder `model.decoder`, without its encoder.
        programs: by name.
        heads: of its keys, in all layers and both attentions.
        head_dim: their dimension.
        positions: the most tokens of a text.
        max_positions: the longest sequence, frames and text together.
    """

    def __init__(
        self,
        model: Any,
        programs: Mapping[str, Program],
        *,
        heads: int,
        head_dim: int,
        positions: int,
        max_positions: int,
    ) -> None:
        self.name: Final = NAME
        self.architecture: Final = type(model).__name__
        self.kernels: Final = "torch"
        self.programs: Final = programs
        self.max_positions: Final = max_positions
        self._model = model
        self._body = model.model.decoder
        self.layout: Final = KVLayout(layers=len(self._body.layers), kv_heads=heads, head_dim=head_dim)
        self._positions: Final = positions
        self._attends: Any = None
        self._attends_to_frames: Any = None

    @property
    def embed_width(self) -> int:
        return int(self._body.embed_tokens.embedding_dim)

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

    def frames_of(self, states: torch.Tensor) -> torch.Tensor:
        """The encoder's states of a window as the layers take them, (F, hidden)."""
        return states

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The states of the text's tokens after the last norm, (T, hidden); zeros for frames."""
        attention = TwoAttentions.of(step, len(inputs), self._attends, self._attends_to_frames)
        # The self-check asks for positions that no text has.
        positions = step.positions[attention.text].clamp(0, self._positions - 1)
        hidden = torch.zeros_like(inputs)
        hidden[attention.text] = self._states(
            inputs[attention.text], positions, inputs[attention.frames], attention
        )
        return hidden

    @abstractmethod
    def _states(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        encoded: torch.Tensor,
        attention: TwoAttentions,
    ) -> torch.Tensor:
        """The states of a text after the last norm, (N, hidden).

        Args:
            embeds: of the text, (N, hidden).
            positions: of the text, (N,).
            encoded: the encoder's states of the frames, (F, hidden): only keys and values are made of them.
            attention: both attentions of each layer.
        """

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """(N, heads * dim) as (N, heads, dim)."""
        return rows.view(len(rows), rows.shape[1] // self.layout.head_dim, self.layout.head_dim)

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.proj_out(hidden.index_select(0, indices))
        return logits.float()

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        states = self._body(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
        return self.head(states, torch.arange(len(states), device=states.device))
