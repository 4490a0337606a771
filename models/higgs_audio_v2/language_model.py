"""The KV node `LLM` of Higgs Audio v2: a language model with two sets of norms and feed-forward weights.

Text has route 0, frames of codes have route 1; all tokens attend together.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from models.base import KVLayout, TokenStep
from models.higgs_audio_v2.graph import LLM
from models.programs import Program


class HiggsAudioLM:
    """A node of the KV engine.

    Args:
        model: transformers' `HiggsAudioV2ForConditionalGeneration`.
        programs: by name.
    """

    masks: Final = frozenset({"causal"})
    kernels: Final = "torch"

    def __init__(
        self, model: Any, programs: Mapping[str, Program], *, layout: KVLayout, weights_digest: str
    ) -> None:
        config = model.config
        self.name: Final = LLM
        self.architecture: Final = type(model).__name__
        self.layout: Final = layout
        self.programs: Final = programs
        self.weights_digest: Final = weights_digest
        self.max_positions: Final[int] = config.max_position_embeddings
        self.vocab_size: Final[int] = config.num_codebooks * config.codebook_size
        self.embed_width: Final[int] = config.hidden_size
        self.device: Final[torch.device] = model.device
        self.dtype: Final[torch.dtype] = model.dtype
        self.parameters: Final = sum(one.numel() for one in model.parameters())
        self._model = model
        self._body = model.model
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)
        self._stock_attention: str = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        # Transformers' body knows sound by the token ids, which packed rows do not have.
        self._is_sound: torch.Tensor | None = None
        self._body.get_placeholder_mask = lambda *_: self._is_sound

    def use_attention(self, name: str) -> None:
        self._body.set_attn_implementation(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._body.embed_tokens(token_ids)
        return found

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.embed(token_ids).index_copy(0, at, rows.to(self.dtype))

    def rows_of(self, codes: torch.Tensor) -> torch.Tensor:
        """The embeddings of frames: (N, codebooks) to (N, hidden)."""
        found: torch.Tensor = self._body.embed_audio_tokens(codes.to(self.device))
        return found

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        return self._states(inputs, step.routes, position_ids=step.positions[None])

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.audio_lm_head(hidden.index_select(0, indices))
        return logits.float()

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        served = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        self.use_attention(self._stock_attention)
        try:
            states = self._states(self.embed(token_ids), None, attention_mask=None)
        finally:
            self.use_attention(served)
        return self.head(states, torch.arange(len(states), device=self.device))

    def _states(self, embeds: torch.Tensor, routes: torch.Tensor | None, **given: Any) -> torch.Tensor:
        """The states of rows, (T, hidden), by their routes, (T,); None: all are text."""
        is_sound = torch.zeros(len(embeds), device=self.device) if routes is None else routes
        # None stands for sound only, which is computed without a mask.
        self._is_sound = None if is_sound.all() else (is_sound != 0)[None]
        found: torch.Tensor = self._body(
            inputs_embeds=embeds[None], use_cache=False, **{"attention_mask": self._no_mask, **given}
        ).last_hidden_state[0]
        return found
