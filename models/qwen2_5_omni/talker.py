"""The KV node `Talker` of Qwen2.5-Omni: a code for each frame of 20 ms.

It hears the whole prompt of the thinker, embeddings and last states added; of media the states alone. The
input of each later token is the code that it just said and one token of the text. After the text come the
mark of its end, and then padding (`models.feeding`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from models.base import KVLayout, TokenStep
from models.feeding import AfterTokens, Draw
from models.omni.graph import CODES
from models.omni.positions import omni_positions
from models.qwen2_5_omni.thinker import RULES
from models.sequence_request import PromptPart


class Talker:
    """A fed node of the KV engine (`workers.kv_engine.stream_nodes.FedNode`).

    Args:
        model: transformers' talker.
        marks: by token, the thinker's embeddings of the end and the padding of a text, and of the voices'
            tokens, (thinker's hidden,) each.
        sounded: the codes below this number can be sounded.
    """

    position_axes: Final = 3
    masks: Final = frozenset({"causal"})
    kernels: Final = "torch"

    def __init__(
        self,
        model: Any,
        marks: Mapping[int, torch.Tensor],
        *,
        sounded: int,
        name: str,
        layout: KVLayout,
        weights_digest: str,
    ) -> None:
        self.name: Final = name
        self.architecture: Final = type(model).__name__
        self.layout: Final = layout
        self.weights_digest: Final = weights_digest
        self._model = model
        self._body = model.model
        config = model.config
        self._config = config
        self.max_positions: Final[int] = config.max_position_embeddings
        self.vocab_size: Final[int] = config.vocab_size
        self.embed_width: Final[int] = config.embedding_size
        self.device: Final[torch.device] = model.device
        self.dtype: Final[torch.dtype] = model.dtype
        self.parameters: Final = sum(one.numel() for one in model.parameters())
        self._stock_attention: str = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)
        ends = (config.tts_codec_pad_token_id, config.tts_codec_end_token_id)
        # Transformers forbids the start alone; any other of these codes would have no sound.
        unsaid = {*range(sounded, config.vocab_size), config.tts_codec_start_token_id} - {*ends}
        self._unsaid = torch.tensor(sorted(unsaid), device=self.device)
        media = [config.audio_token_id, config.image_token_id, config.video_token_id]
        self._media = torch.tensor(media, device=self.device)
        self._marks = {token: mark.to(self.device, self.dtype) for token, mark in marks.items()}
        self._end: Final = self._marks[config.tts_text_end_token_id]
        self._pad: Final = self._marks[config.tts_text_pad_token_id]

    # ---- a node of the KV engine -------------------------------------------------------------------
    def use_attention(self, name: str) -> None:
        self._body.set_attn_implementation(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._body.embed_tokens(token_ids)
        return found

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        # Every token of a fed sequence has a row; the ids of the prompt are the thinker's.
        embeds = rows.new_zeros(len(token_ids), self.embed_width, dtype=self.dtype)
        return embeds.index_copy(0, at, rows.to(self.dtype))

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, float]:
        return omni_positions(self._model, RULES, prompt_ids, parts)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        hidden: torch.Tensor = self._body(
            inputs_embeds=self._model.thinker_to_talker_proj(inputs)[None],
            position_ids=step.positions.unsqueeze(-2),
            attention_mask=dict.fromkeys({*self._body.config.layer_types}, self._no_mask),
            use_cache=False,
        ).last_hidden_state[0]
        return hidden

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.codec_head(hidden.index_select(0, indices)).float()
        return logits.index_fill(1, self._unsaid, -torch.inf)

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        served = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        self._body.set_attn_implementation(self._stock_attention)
        try:
            embeds = self._model.thinker_to_talker_proj(self.embed(token_ids))[None]
            hidden = self._body(inputs_embeds=embeds, use_cache=False).last_hidden_state[0]
        finally:
            self._body.set_attn_implementation(served)
        return self.head(hidden, torch.arange(len(token_ids), device=self.device))

    # ---- a node that is fed ------------------------------------------------------------------------
    def prompt_rows(
        self, token_ids: torch.Tensor, items: torch.Tensor | None, args: Mapping[str, Any]
    ) -> torch.Tensor:
        """The thinker's prompt, the token of the voice, and the first token of the text.

        `items` are (embedding, state) of each token of the thinker's prompt, and of the first new token.
        """
        assert items is not None, "a talker follows a prompt"
        tokens = len(token_ids) - 2
        heard = items[:tokens].to(self.dtype)
        is_medium = torch.isin(token_ids[:tokens], self._media)[:, None]
        prompt = torch.where(is_medium, 0, heard[:, 0]) + heard[:, 1]
        # A text that ended at once has no first token.
        first = self._of(items[tokens]) if len(items) > tokens else self._end
        begin = torch.stack([self._marks[args["speaker"]], first])
        of = self._config
        codes = [of.tts_codec_pad_token_id, of.tts_codec_start_token_id]
        return torch.cat([prompt, begin + self.embed(torch.tensor(codes, device=self.device))])

    def after_tokens(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        draw: Draw,
    ) -> AfterTokens:
        """Send each code."""
        return AfterTokens(rows=self.embed(tokens), values={CODES: tokens.int()})

    def next_rows(self, rows: torch.Tensor, items: Sequence[torch.Tensor | int]) -> torch.Tensor:
        """Add the next token of the text; after its end, the mark of the end, and then padding."""
        spoken = [
            (self._pad if item else self._end) if isinstance(item, int) else self._of(item) for item in items
        ]
        return rows + torch.stack(spoken)

    def _of(self, item: torch.Tensor) -> torch.Tensor:
        """A token of the text: its embedding, and its state."""
        found: torch.Tensor = item.to(self.dtype).sum(0)
        return found
