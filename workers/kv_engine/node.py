"""The KV node contract: the methods and attributes that the KV engine needs of a model.

    backbone        embed(token_ids)        input of `forward`, for packed tokens
                    forward(inputs, step)   hidden states; its layers attend over the paged pool
    language head   head(hidden, indices)   logits at chosen tokens

A node knows no sequences, blocks or requests. It computes one packed batch of T tokens; the attention
function separates the sequences in it. All methods are called in the engine's thread.
"""

from typing import Protocol

import torch

from models.base import KVLayout, TokenStep


class Backbone(Protocol):
    """The layers of a model: token ids to hidden states.

    Attributes:
        name: the name of the node in the model's graph. The random draws of its sequences depend on it.
        architecture: the name of the model class in the checkpoint's `config.json`.
        layout: the shape of its keys and values: layers, KV heads, numbers per head.
        kernels: the implementation of its layers: `torch`, `triton`, or the variant of the CPU kernels.
        max_positions: the longest sequence that the model supports, in tokens.
        parameters: the number of its parameters. On a CPU it decides the number of threads.
        device: the device of its weights, its inputs and its outputs.
        dtype: the dtype of its weights, hidden states, keys and values.
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
    def max_positions(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def use_attention(self, name: str) -> None:
        """Set the attention function of all layers to the one registered as `name`.

        Functions are registered with `transformers.AttentionInterface`; the engine's is
        `workers.kv_engine.attention.paged.paged_attention`. Called once, before the first `forward`.
        """
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the input of `forward` for (T,) int32 token ids.

        Either embeddings, (T, hidden) of `dtype`, or the ids themselves if `forward` embeds them.
        """
        ...

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """Return the hidden states of the T tokens after the last layer, (T, hidden) of `dtype`.

        Each layer calls the attention function with its packed queries, keys and values. That function stores
        the keys and values in the pool and attends over the pool.

        Args:
            inputs: the result of `embed`.
            step: the token ids and positions; the engine sets the other tensors in a context of the thread.
        """
        ...


class LanguageHead(Protocol):
    """The output layer of a model: hidden states to logits.

    Attributes:
        vocab_size: the number of logits per token. Token ids are from 0 to `vocab_size` - 1.
    """

    @property
    def vocab_size(self) -> int: ...

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the logits at S of the T tokens, (S, vocab_size) float32.

        The result is a new tensor: penalties, masks and filters are applied to it in place.

        Args:
            hidden: (T, hidden), the result of `forward`.
            indices: (S,) int32 or int64, indices of tokens in `hidden`.
        """
        ...


class KVNode(Backbone, LanguageHead, Protocol):
    """A model that the engine can run: a backbone, a language head, and the reference for its self-check."""

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of one sequence as the stock model computes them, (T, vocab_size) float32.

        The stock model computes all tokens in one pass, with its own attention and without a pool. At load,
        `workers.kv_engine.selfcheck.check_node` compares the logits over the pool with these.

        Args:
            token_ids: (T,) int64, the ids of one sequence from its beginning.
        """
        ...
