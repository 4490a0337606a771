"""A decoder-only language model of transformers as a node of the KV engine: backbone and language head.

The modules are transformers' own. The node knows no pool and no requests: the engine sets the attention
function of its layers.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from models.base import KVLayout, TokenStep
from models.transformers_lm import left_weights
from models.transformers_lm.adapters import AdaptedModules
from models.transformers_lm.architecture import body_name_of, body_of
from models.transformers_lm.indexers import choosing_all
from models.transformers_lm.left_weights import Floats, Readers, Stored
from models.transformers_lm.longrope import LongFactors
from shared.errors import BugError


class DecoderLM:
    """A node of the KV engine (`workers.kv_engine.node.KVNode`, with the documentation of all members).

    Attributes:
        weights_digest: a digest that distinguishes checkpoints (hex).
        rotary_change: the longest sequence with short rotary factors (`models.transformers_lm.longrope`).
        stored_weights: what reads weights that the checkpoint stores as numbers of few bits.
        left_floats: what reads as floats the weights that are left in the files: on a CPU those of experts.
        is_filled: all weights are in the model, as floats; otherwise these are placeholders.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        layout: KVLayout,
        max_positions: int,
        weights_digest: str,
        rotary_change: int | None = None,
        stored_weights: Stored = MappingProxyType({}),
        left_floats: Floats = MappingProxyType({}),
        is_filled: bool = True,
    ) -> None:
        self.name: Final = name
        self.layout: Final = layout
        self.max_positions: Final = max_positions
        self.weights_digest: Final = weights_digest
        self.architecture: Final = type(model).__name__
        self.kernels: Final = "torch"
        self.stored_weights = stored_weights
        self.left_floats = left_floats
        self.is_filled = is_filled
        self._model = model
        self.rotary_change: Final = rotary_change
        self._long_factors: LongFactors | None = None
        if rotary_change is not None:
            self._long_factors = LongFactors(body_of(model).rotary_emb, rotary_change)
        self._head = _head_of(model)
        self._stock_attention: str = body_of(model).config._attn_implementation  # noqa: SLF001 - no public reader
        # A mask of four dimensions is used as it is. Without one, transformers looks for packed sequences in
        # the positions, which costs a host synchronization per forward.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self._model

    def fill(self, *, but: Collection[str] = ()) -> None:
        """Read the weights that are placeholders, as floats; those of the modules `but` remain."""
        if not self.is_filled:
            readers: Readers = {**self.stored_weights, **self.left_floats}
            left_weights.fill(self._model, {name: readers[name] for name in readers if name not in but})
            self.is_filled = not but

    def close_files(self) -> None:
        """Let the pages of the files go: forget what reads them, and copy the tensors that are in them."""
        self.stored_weights, self.left_floats = {}, {}
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if tensor.device.type == "cpu":
                tensor.data = tensor.data.clone()

    @cached_property
    def adapted_modules(self) -> AdaptedModules:
        """What LoRA adapters may change."""
        return AdaptedModules(self._model)

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
        body_of(self._model).set_attn_implementation(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        # The ids themselves: some models scale their embeddings within `forward`.
        return token_ids

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        if not self.is_filled:
            raise BugError(f"{self.name}: its weights are placeholders: expected a call of `fill` before")
        given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs[None]}
        with self.choosing_factors(step):
            output = body_of(self._model)(
                **given,
                position_ids=step.positions.unsqueeze(-2),
                attention_mask=self._no_mask,
                use_cache=False,
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def choosing_factors(self, step: TokenStep) -> AbstractContextManager[None]:
        """Return a context in which rotary angles are those of the step's tokens, short or long."""
        return nullcontext() if self._long_factors is None else self._long_factors.of(step.long_factors)

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens, of which those at `at` are `rows`."""
        embeds: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        return embeds.index_copy(0, at, rows.to(embeds.dtype))

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        # By the model's own `forward`: some models scale or cap their logits after the matrix.
        logits: torch.Tensor = self._head(inputs_embeds=hidden.index_select(0, indices)[None]).logits[0]
        return logits.float()

    def choosing_all(self) -> AbstractContextManager[None]:
        return choosing_all(self._model)

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        body = body_of(self._model)
        served = body.config._attn_implementation  # noqa: SLF001 - no public reader
        body.set_attn_implementation(self._stock_attention)
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            body.set_attn_implementation(served)
        return logits.float()


# ---- head ------------------------------------------------------------------------------------------


@dataclass
class _BodyOutput(MoeModelOutputWithPast):  # type: ignore[misc] # transformers has no types
    """The output of a model body with all attributes that heads read, most of them None."""

    cross_attentions: None = None
    image_hidden_states: None = None
    video_hidden_states: None = None
    audio_hidden_states: None = None
    rope_deltas: None = None
    cache_params: None = None
    shared_kv_states: None = None


class _Given(torch.nn.Module):
    """A replacement of a model's body: returns its input. Heads may read other attributes of the body."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.__dict__["_body"] = body  # not as a child: its weights are not the head's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"], name)

    @property
    def decoder(self) -> "_Given":  # OPT's head calls a part of the body
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


def _head_of(model: Any) -> Any:
    """The same model with shared weights and an empty body: hidden states to logits."""
    head = copy(model)
    head.__dict__["_modules"] = {**model._modules, body_name_of(model): _Given(body_of(model))}  # noqa: SLF001 - torch's own
    return head
