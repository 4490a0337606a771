"""Cohere Transcribe's decoder over the KV pool: Moonshine's layers with learned positions.

Transformers' classes are derived from each other in the same way.
"""

from typing import Any

import torch

from models.moonshine.decoder import MoonshineDecoder
from models.speech_to_text.frames_decoder import TwoAttentions


class CohereDecoder(MoonshineDecoder):
    """A node of the KV engine."""

    def frames_of(self, states: torch.Tensor) -> torch.Tensor:
        frames: torch.Tensor = self._body.proj(states.to(self.dtype))
        return frames

    def _states(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        encoded: torch.Tensor,
        attention: TwoAttentions,
    ) -> torch.Tensor:
        states = self._body.embedding_layernorm(embeds + self._body.pos_emb(positions))
        return self._layers(states, encoded, attention, None)

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        body: Any = self._body
        projection = body.proj
        # The stock decoder without an encoder: it would project its missing states.
        body.proj = torch.nn.Identity()
        try:
            return super().reference(token_ids)
        finally:
            body.proj = projection
