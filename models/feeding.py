"""Values of fed KV nodes, whose steps take embeddings that are made outside of the model's layers.

    prompt_rows    the stream's first items           -> the embeddings of the prompt
    after_tokens   sampled tokens and their states    -> a row each, and further values such as codes
    next_rows      these rows, and the stream's items -> the embeddings of the tokens in the next step

The contract is `workers.kv_engine.stream_nodes.FedNode`. torch is imported for types only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Draw(Protocol):
    """Chooses values by `SequenceRequest.inner_sampling` and the seeds of the sequences of a step."""

    def __call__(self, logits: "torch.Tensor", name: str) -> "torch.Tensor":
        """Return a choice of each row: (S, V) float32 to (S,) int64, from 0 to V - 1.

        Args:
            logits: one row for each of the S sequences.
            name: names the choice among those of one token, such as `code 3`: equal names draw equal numbers.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterTokens:
    """The result of a fed node for the S tokens that a step sampled.

    Attributes:
        rows: (S, hidden), what the tokens themselves add to their embeddings.
        values: by edge, tensors (S, ...) that are sent to the streams of that name, one item for each token.
    """

    rows: "torch.Tensor"
    values: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
