"""The KV node `LLM` of CSM: a backbone for the first code of each frame, and a depth decoder for the rest.

Speech ends with a frame whose codes, but for the last, all are the end's. A single code of it is an
ordinary one, so the engine could not tell the end by the token that it sampled. Therefore the vocabulary has
one token more, the end of speech: the row of an ending frame is zeros, which no sum of embeddings is, and the
next token after zeros is the end, whatever the sampling.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers import DynamicCache

from models.base import KVLayout, TokenStep
from models.csm.graph import CODES, LLM
from models.feeding import AfterTokens, Draw


class SpeechLM:
    """A fed node of the KV engine (`workers.kv_engine.stream_nodes.FedNode`), which takes no stream.

    Args:
        model: transformers' CSM, without its codec.
    """

    masks: Final = frozenset({"causal"})
    kernels: Final = "torch"

    def __init__(self, model: Any, *, layout: KVLayout, weights_digest: str) -> None:
        config = model.config
        self.name: Final = LLM
        self.architecture: Final = type(model).__name__
        self.layout: Final = layout
        self.weights_digest: Final = weights_digest
        self._model = model
        self._body = model.backbone_model
        self._codes = self._body.embed_tokens.embed_audio_tokens
        self.groups: Final[int] = config.num_codebooks
        self.end: Final[int] = config.vocab_size
        self._end_code: Final[int] = config.codebook_eos_token_id
        self.max_positions: Final[int] = config.max_position_embeddings
        self.vocab_size: Final[int] = config.vocab_size + 1
        self.embed_width: Final[int] = config.hidden_size
        self.device: Final[torch.device] = model.device
        self.dtype: Final[torch.dtype] = model.dtype
        self.parameters: Final = sum(one.numel() for one in model.parameters())
        self._stock_attention: str = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)

    # ---- a node of the KV engine -------------------------------------------------------------------
    def use_attention(self, name: str) -> None:
        self._body.set_attn_implementation({"": name})  # and not of the depth decoder

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._codes(token_ids.clamp(max=self.end - 1))
        return found

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        # Every token of a fed sequence has a row.
        embeds = rows.new_zeros(len(token_ids), self.embed_width, dtype=self.dtype)
        return embeds.index_copy(0, at, rows.to(self.dtype))

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        hidden: torch.Tensor = self._body(
            inputs_embeds=inputs[None],
            position_ids=step.positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
        ).last_hidden_state[0]
        return hidden.masked_fill(is_zero(inputs)[:, None], 0)

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        chosen = hidden.index_select(0, indices)
        logits: torch.Tensor = self._model.lm_head(chosen).float()
        ended = is_zero(chosen)[:, None]
        end = torch.zeros_like(logits[:, :1]).masked_fill(~ended, -torch.inf)
        return torch.cat([logits.masked_fill(ended, -torch.inf), end], dim=1)

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        served = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        self.use_attention(self._stock_attention)
        try:
            embeds = self.embed(token_ids)[None]
            hidden = self._body(inputs_embeds=embeds, use_cache=False).last_hidden_state[0]
        finally:
            self.use_attention(served)
        return self.head(hidden, torch.arange(len(token_ids), device=self.device))

    # ---- a node that is fed ------------------------------------------------------------------------
    def prompt_rows(
        self, token_ids: torch.Tensor, items: torch.Tensor | None, args: Mapping[str, Any]
    ) -> torch.Tensor:
        """The embeddings of the text."""
        found: torch.Tensor = self._model.embed_text_tokens(token_ids)
        return found

    def after_tokens(self, tokens: torch.Tensor, hidden: torch.Tensor, draw: Draw) -> AfterTokens:
        """Predict the other codes of each frame. The row of an ending frame is zeros."""
        is_end = tokens == self.end
        codes = self._frames(tokens.masked_fill(is_end, self._end_code), hidden, draw)
        rows: torch.Tensor = self._body.embed_tokens(codes[:, None])[:, 0]
        ending = is_end | (codes[:, :-1] == self._end_code).all(1)
        codes = codes.masked_fill(is_end[:, None], self._end_code)
        return AfterTokens(rows=rows.masked_fill(ending[:, None], 0), values={CODES.name: codes.int()})

    def next_rows(self, rows: torch.Tensor, items: Sequence[torch.Tensor | int]) -> torch.Tensor:
        """The frame itself: nothing is added."""
        return rows

    def _frames(self, tokens: torch.Tensor, hidden: torch.Tensor, draw: Draw) -> torch.Tensor:
        """All codes of each frame, (S, groups). The cache lives as long as the frame."""
        decoder = self._model.depth_decoder
        cache = DynamicCache(config=decoder.config)
        codes = [tokens]
        # The place before the first code has the state of the backbone.
        inputs, given = (
            torch.stack([torch.zeros_like(tokens), tokens], dim=1),
            {"backbone_last_hidden_state": hidden},
        )
        for group in range(1, self.groups):
            logits = decoder(
                input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1, **given
            ).logits[:, -1]
            codes.append(draw(logits.float(), f"code {group}"))
            inputs, given = codes[-1][:, None], {}
        return torch.stack(codes, dim=1)


def is_zero(rows: torch.Tensor) -> torch.Tensor:
    """True for rows of zeros: (N, width) to (N,)."""
    return (rows == 0).all(-1)
