"""The contract of KV nodes at the ends of streams of tensors (ADR 38), beside `workers.kv_engine.node`.

    sends    forward_with_states                        a tensor for each computed token
    takes    prompt_rows, after_tokens, next_rows       embeddings made of a stream and of the last tokens

Both are optional. All methods are called in the engine's thread, under `torch.inference_mode`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from models.base import TokenStep
from models.feeding import AfterTokens, Draw
from workers.kv_engine.node import Backbone


class StatesNode(Backbone, Protocol):
    """A backbone that can send a tensor for each token that it computes, such as the states of a layer."""

    def forward_with_states(
        self, inputs: Any, step: TokenStep
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return what `forward` returns, and by edge a tensor (T, ...).

        Called in place of `forward` in steps with a sequence that sends them.
        """
        ...


class FedNode(Backbone, Protocol):
    """A backbone whose steps take embeddings that are made of a stream, of the last tokens, or of both.

    Its sequences are not computed from token ids: the embedding of each token is a row. It has `splice`
    (`MediaBackbone`), which gets these rows. Items of a stream are on the node's device, in the dtype that
    they were sent with.
    """

    def prompt_rows(
        self, token_ids: torch.Tensor, items: torch.Tensor | None, args: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the embeddings of a prompt, (T, hidden).

        Args:
            token_ids: (T,) int32, the input `token_ids` of the walk.
            items: the stream's first `SequenceRequest.prompt_items` items, stacked; fewer if it ended before;
                None without any.
            args: the arguments of the walk.
        """
        ...

    def after_tokens(self, tokens: torch.Tensor, hidden: torch.Tensor, draw: Draw) -> AfterTokens:
        """Return the rows of sampled tokens, and the values that they are sent with.

        Called once per step, for all its sequences. What it makes of one must not depend on the others.

        Args:
            tokens: (S,) int64.
            hidden: (S, hidden), the states that they were sampled from.
            draw: chooses values by the request's parameters and seed.
        """
        ...

    def next_rows(self, rows: torch.Tensor, items: Sequence[torch.Tensor | int]) -> torch.Tensor:
        """Return the embeddings of tokens in the next step, (S, hidden).

        Args:
            rows: (S, hidden), those that `after_tokens` returned for these tokens.
            items: for each token the stream's next item; after its end, the number of steps since then,
                from 0. Without a stream, the number of the token from 0.
        """
        ...


def sends_states(node: Backbone) -> bool:
    """True for a `StatesNode`."""
    return hasattr(node, "forward_with_states")


def is_fed(node: Backbone) -> bool:
    """True for a `FedNode`."""
    return hasattr(node, "after_tokens")
