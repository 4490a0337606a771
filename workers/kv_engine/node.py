"""What the KV-cache engine asks of a model: the node contract.

    embed(inputs)         ids, or embeddings, of the packed tokens
    forward(inputs, step) their hidden states; attention goes to the pool by itself
    head(hidden, index)   logits of the chosen tokens

A node knows nothing of rows, blocks or requests. It runs one packed sequence of T tokens, whoever's
they are: its attention tells them apart.
"""

from typing import Protocol

import torch

from models.base import KVLayout


class TokenStep(Protocol):
    """What a node may read of a step."""

    @property
    def token_ids(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...


class Node(Protocol):
    """A model the engine can run.

    Attributes:
        name: its name in the graph; a part of the key of its randomness.
        architecture: its name in the checkpoint.
        layout: the shape of its keys and values.
        max_positions: the longest sequence it was made for.
        kernels: who computes its layers: `torch`, the CPU kernels by their kind of processor, or `triton`.
    """

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def kernels(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def use_attention(self, name: str) -> None:
        """From now on, every layer's attention is the function registered under `name`."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(T,) ids to what `forward` takes: the ids themselves, or (T, hidden) embeddings."""
        ...

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The T tokens' hidden states, (T, hidden)."""
        ...

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The logits behind the tokens at `indices`: (S, vocab) float32."""
        ...

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits (T, vocab) of one sequence as the stock model computes them, without any pool."""
        ...
