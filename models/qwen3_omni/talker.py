"""The KV node `Talker`: speaks what the thinker writes, a frame of codes for each of its tokens.

Its prompt is made of the thinker's states of the user's turns, and of the begin of the answer; the input of
each later token is the sum of the codes that it just said and the next token of the text. After the text come
the mark of its end, and then padding (`models.feeding`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from models.base import KVLayout, TokenStep
from models.feeding import AfterTokens, Draw
from models.omni.graph import CODES
from models.omni.positions import omni_positions
from models.omni.prepared import TURN_TOKENS
from models.qwen3_omni.code_predictor import CodePredictor
from models.qwen3_omni.speech_prompts import SPOKEN_TOKENS
from models.qwen3_omni.thinker import RULES
from models.sequence_request import PromptPart

UNSAID: Final = 1024
"""The last codes of the vocabulary are special; of these, only the end of speech is ever said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The thinker's tokens around a spoken text, projected for the talker, (hidden,) each."""

    begin: torch.Tensor
    end: torch.Tensor
    pad: torch.Tensor


class Talker:
    """A fed node of the KV engine (`workers.kv_engine.stream_nodes.FedNode`).

    Args:
        model: transformers' talker.
        marks: (3, thinker's hidden), the thinker's embeddings of begin, end and padding of a text.
    """

    position_axes: Final = 3
    fractional_positions: Final = True
    masks: Final = frozenset({"causal"})
    kernels: Final = "torch"

    def __init__(
        self, model: Any, marks: torch.Tensor, *, name: str, layout: KVLayout, weights_digest: str
    ) -> None:
        self.name: Final = name
        self.architecture: Final = type(model).__name__
        self.layout: Final = layout
        self.weights_digest: Final = weights_digest
        self._model = model
        self._body = model.model
        self._config = model.config
        self._predictor: Final = CodePredictor(model.code_predictor)
        text = model.config.text_config
        self.max_positions: Final[int] = text.max_position_embeddings
        self.vocab_size: Final[int] = text.vocab_size
        self.embed_width: Final[int] = text.hidden_size
        self.device: Final[torch.device] = model.device
        self.dtype: Final[torch.dtype] = model.dtype
        self.parameters: Final = sum(one.numel() for one in model.parameters())
        self._stock_attention: str = self._body.config._attn_implementation  # noqa: SLF001 - no public reader
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)
        end = model.config.codec_eos_token_id
        unsaid = [one for one in range(text.vocab_size - UNSAID, text.vocab_size) if one != end]
        self._unsaid = torch.tensor(unsaid, device=self.device)
        media = [model.config.audio_token_id, model.config.image_token_id, model.config.video_token_id]
        self._media = torch.tensor(media, device=self.device)
        with torch.inference_mode():
            projected = model.text_projection(marks.to(self.device, self.dtype))
        self._marks: Final = Marks(begin=projected[0], end=projected[1], pad=projected[2])

    # ---- a node of the KV engine -------------------------------------------------------------------
    def use_attention(self, name: str) -> None:
        self._body.set_attn_implementation(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._body.codec_embedding(token_ids)
        return found

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        # Every token of a fed sequence has a row; the ids of the prompt are the thinker's.
        embeds = rows.new_zeros(len(token_ids), self.embed_width, dtype=self.dtype)
        return embeds.index_copy(0, at, rows.to(self.dtype))

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, float]:
        # `generate` of transformers tells the thinker of sound tracks, and not the talker.
        return omni_positions(self._model, RULES, prompt_ids, parts, knows_films=False)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        hidden: torch.Tensor = self._body(
            inputs_embeds=inputs[None],
            position_ids=step.positions.unsqueeze(-2),
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
        self._body.set_attn_implementation(self._stock_attention)
        try:
            embeds = self.embed(token_ids)[None]
            hidden = self._body(inputs_embeds=embeds, use_cache=False).last_hidden_state[0]
        finally:
            self._body.set_attn_implementation(served)
        return self.head(hidden, torch.arange(len(token_ids), device=self.device))

    # ---- a node that is fed ------------------------------------------------------------------------
    def prompt_rows(
        self, token_ids: torch.Tensor, items: torch.Tensor | None, args: Mapping[str, Any]
    ) -> torch.Tensor:
        """The user's turns; then the begin of the answer, up to the first token of the text.

        `items` are (embedding, state) of each token of the thinker's prompt, and of the first new token. The
        talker hears media by the states of their tokens, and text by its embeddings.
        """
        assert items is not None, "a talker follows a prompt"
        heard = torch.cat([items[start:end] for start, end in args["spans"]])
        is_medium = torch.isin(token_ids[: len(heard)], self._media)[:, None]
        user = torch.where(is_medium, self._of_state(heard[:, 1]), self._of_text(heard[:, 0]))
        tokens = self._prompt_tokens(args, items)
        turn = self._of_text(items[tokens - TURN_TOKENS : tokens, 0])
        first = self._of_text(items[tokens:, 0])
        if not len(first):  # the text ended at once
            first = self._marks.end[None]
        padding = self._marks.pad.expand(SPOKEN_TOKENS - TURN_TOKENS - 2, -1)
        said = torch.cat([padding, self._marks.begin[None], first]) + self.embed(self._codes(args["speaker"]))
        return torch.cat([user, turn, said])

    def after_tokens(self, tokens: torch.Tensor, hidden: torch.Tensor, draw: Draw) -> AfterTokens:
        """Predict the other codes of each frame."""
        codes, rows = self._predictor.frame(tokens, hidden, self.embed(tokens), draw)
        return AfterTokens(rows=rows, values={CODES: codes})

    def next_rows(self, rows: torch.Tensor, items: Sequence[torch.Tensor | int]) -> torch.Tensor:
        """Add the next token of the text; after its end, the mark of the end, and then padding."""
        spoken = [
            (self._marks.pad if item else self._marks.end)
            if isinstance(item, int)
            else self._of_text(item[0])
            for item in items
        ]
        return rows + torch.stack(spoken)

    def _of_text(self, embeds: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._model.text_projection(embeds.to(self.dtype))
        return found

    def _of_state(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._model.hidden_projection(states.to(self.dtype))
        return found

    def _prompt_tokens(self, args: Mapping[str, Any], items: torch.Tensor) -> int:
        """The number of tokens of the thinker's prompt: without the first new one, if there is one."""
        return min(len(items), int(args["prompt_items"]) - 1)

    def _codes(self, speaker: int) -> torch.Tensor:
        """The codes before the first one that is said."""
        of = self._config
        begin = [of.codec_nothink_id, of.codec_think_bos_id, of.codec_think_eos_id, speaker]
        return torch.tensor([*begin, of.codec_pad_id, of.codec_bos_id], device=self.device)
