"""The KV node `Talker`: speaks a text, a frame of codes at a time.

Each token of the prompt is the sum of a text's embedding and a code's: the text says what is spoken, and the
codes before it the language and the voice. The input of a later token is the sum of the codes that were just
said, and of padding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from models.base import KVLayout, TokenStep
from models.feeding import AfterTokens, Draw
from models.qwen3_omni.code_predictor import CodePredictor
from models.qwen3_omni.talker import UNSAID
from models.qwen3_tts.graph import CODES, TALKER


class Talker:
    """A fed node of the KV engine (`workers.kv_engine.stream_nodes.FedNode`), which takes no stream.

    Args:
        model: `models.qwen3_tts.talker_model.TalkerModel`.
        pad: the token of the text that means padding.
    """

    masks: Final = frozenset({"causal"})
    kernels: Final = "torch"

    def __init__(self, model: Any, *, pad: int, layout: KVLayout, weights_digest: str) -> None:
        config = model.config
        self.name: Final = TALKER
        self.architecture: Final = type(model).__name__
        self.layout: Final = layout
        self.weights_digest: Final = weights_digest
        self._model = model
        self._body = model.model
        self._predictor: Final = CodePredictor(model.code_predictor)
        self.max_positions: Final[int] = config.max_position_embeddings
        self.vocab_size: Final[int] = config.vocab_size
        self.embed_width: Final[int] = config.hidden_size
        self.device: Final[torch.device] = model.device
        self.dtype: Final[torch.dtype] = model.dtype
        self.parameters: Final = sum(one.numel() for one in model.parameters())
        self._stock_attention: str = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)
        end = config.codec_eos_token_id
        unsaid = [one for one in range(self.vocab_size - UNSAID, self.vocab_size) if one != end]
        self._unsaid = torch.tensor(unsaid, device=self.device)
        with torch.inference_mode():
            self._pad: Final = self._of_text(torch.tensor([pad], device=self.device))[0]

    # ---- a node of the KV engine -------------------------------------------------------------------
    def use_attention(self, name: str) -> None:
        self._body.set_attn_implementation(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._body.codec_embedding(token_ids)
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
        return hidden

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.codec_head(hidden.index_select(0, indices)).float()
        return logits.index_fill(1, self._unsaid, -torch.inf)

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
        """Text and codes of the prompt; after those of the voice, codes are padding, and the last begins."""
        of, plain = self._model.config, int(args["plain_tokens"])
        codes = [*args["codes"]]
        codes += [of.codec_pad_id] * (len(token_ids) - plain - len(codes) - 1) + [of.codec_bos_id]
        rows = self._of_text(token_ids)
        said = self.embed(torch.tensor(codes, device=self.device))
        return torch.cat([rows[:plain], rows[plain:] + said])

    def after_tokens(self, tokens: torch.Tensor, hidden: torch.Tensor, draw: Draw) -> AfterTokens:
        """Predict the other codes of each frame."""
        codes, rows = self._predictor.frame(tokens, hidden, self.embed(tokens), draw)
        return AfterTokens(rows=rows, values={CODES.name: codes})

    def next_rows(self, rows: torch.Tensor, items: Sequence[torch.Tensor | int]) -> torch.Tensor:
        """Add padding: the prompt has all of the text."""
        return rows + self._pad

    def _of_text(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._model.text_projection(self._body.text_embedding(token_ids))
        return found
