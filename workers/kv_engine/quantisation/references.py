"""The logits of the stock model for the self-check, computed while its weights are packed and freed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shared.errors import BugError
from workers.kv_engine.attention import paged
from workers.kv_engine.kernel_models import TextModel
from workers.kv_engine.node import FULL, masks_of
from workers.kv_engine.quantisation.forms import Forms, quantised_layers
from workers.kv_engine.quantisation.matrices import experts_of, linears_of
from workers.kv_engine.selfcheck import masked_logits, text_for


@dataclass(frozen=True, slots=True)
class References:
    """The logits of one text.

    Attributes:
        text: its token ids, (T,).
        logits: (T, vocab_size).
        masked: the same for the mask `full`; None if the node does not declare it.
    """

    text: torch.Tensor
    logits: torch.Tensor
    masked: torch.Tensor | None

    @classmethod
    def while_packing(cls, node: Any, forms: Forms, pack: Callable[[int], None]) -> "References":
        """Compute them with weights in their forms; `pack` gets each layer's number after its last use."""
        model, text = TextModel.of(node), text_for(node)
        layers = model.body.layers
        masked = None

        def packed(number: int) -> None:
            pack(number)
            forms.forget()

        with quantised_layers(linears_of(model), experts_of(model), forms):
            if FULL in masks_of(node):
                node.use_attention(paged.ATTENTION)
                with _called_after(layers, lambda _: forms.forget()):
                    masked = masked_logits(node, by_torch=True)
            with _called_after(layers, packed):
                logits = node.reference(text)
        return cls(text, logits, masked)

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the text.

        Raises:
            BugError: it is another one.
        """
        if not torch.equal(self.text, token_ids):
            raise BugError(
                "the reference logits exist for the text of the self-check only: the weights are packed"
            )
        return self.logits

    @property
    def of_mask(self) -> torch.Tensor:
        """The logits for the mask `full`."""
        assert self.masked is not None, "the node declares the mask"
        return self.masked


@contextmanager
def _called_after(layers: Sequence[Any], call: Callable[[int], None]) -> Iterator[None]:
    """Within this context, `call` gets the number of each layer after its forward pass."""

    def after(number: int, *_: Any) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():  # what it makes stays in use
            call(number)

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_hook(partial(after, number)))
        yield
