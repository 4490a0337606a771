"""The torch nodes: transformers' own thinker, talker, code predictor and codec."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from models.base import Item, KVLayout, StatelessResult, TokenStep
from models.checkpoints.progress import Progress, silent
from models.feeding import AfterTokens, Draw

SOUND: Final = 311
SPOKEN_PROMPT: Final = 9
ASSISTANT_PROMPT: Final = 3


class TextNode:
    """A text model and its head, as a node of the KV engine."""

    kernels = "torch"

    def __init__(self, name: str, body: Any, embedding: Any, head: Any) -> None:
        self.name: Final = name
        self.body: Final = body
        self.architecture: Final = type(body).__name__
        config = body.config
        self.layout: Final = KVLayout(
            layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
        )
        self.max_positions: Final[int] = config.max_position_embeddings
        self.parameters: Final = sum(one.numel() for one in body.parameters())
        self.dtype: Final[torch.dtype] = body.dtype
        self.device: Final[torch.device] = body.device
        self.vocab_size: Final[int] = config.vocab_size
        self._embedding = embedding
        self._head = head
        self._no_mask = torch.zeros(1, 1, 1, 1)

    def use_attention(self, name: str) -> None:
        """Set the attention function of all layers."""
        self.body.set_attn_implementation(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings."""
        found: torch.Tensor = self._embedding(token_ids)
        return found

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The embeddings, of which those at `at` are `rows`."""
        return self.embed(token_ids).index_copy(0, at, rows)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The hidden states after the last layer."""
        found: torch.Tensor = self.body(
            inputs_embeds=inputs[None],
            position_ids=step.positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
        ).last_hidden_state[0]
        return found

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The logits at `indices`."""
        logits: torch.Tensor = self._head(hidden.index_select(0, indices)).float()
        return logits

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits of one sequence by the stock model."""
        served = self.body.config._attn_implementation
        self.body.set_attn_implementation("sdpa")
        try:
            hidden = self.body(inputs_embeds=self.embed(token_ids)[None], use_cache=False).last_hidden_state[
                0
            ]
        finally:
            self.body.set_attn_implementation(served)
        return self.head(hidden, torch.arange(len(token_ids)))


class Thinker(TextNode):
    """Writes the text, and sends for each token its embedding and its state after a layer: (2, hidden)."""

    def __init__(self, name: str, model: Any) -> None:
        text = model.thinker.model.language_model
        super().__init__(name, text, text.embed_tokens, model.thinker.lm_head)
        self._layer = text.layers[model.config.talker_config.accept_hidden_layer - 1]

    def forward_with_states(
        self, inputs: torch.Tensor, step: TokenStep
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The hidden states, and those that the talker accepts."""
        found: list[torch.Tensor] = []
        hook = self._layer.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
        try:
            hidden = self.forward(inputs, step)
        finally:
            hook.remove()
        return hidden, {"states": torch.stack([inputs, found[0]], dim=1)}


class Talker(TextNode):
    """Speaks: its prompt and its steps are made of the thinker's states, and of the codes that it said."""

    def __init__(self, name: str, model: Any) -> None:
        talker, config = model.talker, model.config
        super().__init__(name, talker.model, talker.model.codec_embedding, talker.codec_head)
        self._talker = talker
        self._groups: int = config.talker_config.num_code_groups
        vocab, end = config.talker_config.text_config.vocab_size, config.talker_config.codec_eos_token_id
        self._unsaid = torch.tensor([one for one in range(vocab - 1024, vocab) if one != end])
        special = torch.tensor([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
        with torch.inference_mode():
            spoken = talker.text_projection(model.thinker.model.language_model.embed_tokens(special))
            self._bos, self._eos, self._pad = spoken.unbind()
        of = config.talker_config
        begin = [of.codec_nothink_id, of.codec_think_bos_id, of.codec_think_eos_id, of.speaker_id["ethan"]]
        self._begin = torch.tensor([*begin, of.codec_pad_id, of.codec_bos_id])

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The logits, without tokens that are never said."""
        return super().head(hidden, indices).index_fill(1, self._unsaid, -torch.inf)

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The rows: each token has one, and the ids of the prompt are not the talker's."""
        return rows.new_zeros(len(token_ids), rows.shape[1]).index_copy(0, at, rows)

    def prompt_rows(
        self,
        token_ids: torch.Tensor,
        items: torch.Tensor | None,
        args: Mapping[str, Any],
    ) -> torch.Tensor:
        """The user's tokens; then the beginning of an answer, up to the first token of the text."""
        assert items is not None, "a talker follows a prompt"
        user = len(token_ids) - SPOKEN_PROMPT
        is_sound = (token_ids[:user] == SOUND)[:, None]
        texts = self._talker.text_projection(items[:, 0])
        sounds = self._talker.hidden_projection(items[:user, 1])
        begin, first = texts[user : user + ASSISTANT_PROMPT], texts[user + ASSISTANT_PROMPT :]
        if not len(first):  # the text ended at once
            first = self._eos[None]
        said = torch.cat([self._pad.expand(4, -1), self._bos[None], first]) + self.embed(self._begin)
        return torch.cat([torch.where(is_sound, sounds, texts[:user]), begin, said])

    def after_tokens(self, tokens: torch.Tensor, hidden: torch.Tensor, draw: Draw) -> AfterTokens:
        """Predict the other codes of each frame, one after the other."""
        predictor = self._talker.code_predictor
        tables = predictor.model.get_input_embeddings()
        rows = self.embed(tokens)
        inputs, codes = [hidden, rows], [tokens]
        for group in range(self._groups - 1):
            states = predictor.model(inputs_embeds=torch.stack(inputs, dim=1), use_cache=False)
            code = draw(predictor.lm_head[group](states.last_hidden_state[:, -1]), f"code {group + 1}")
            inputs.append(tables[group](code))
            codes.append(code)
            rows = rows + inputs[-1]
        return AfterTokens(rows=rows, values={"codes": torch.stack(codes, dim=1).int()})

    def next_rows(self, rows: torch.Tensor, items: Sequence[torch.Tensor | int]) -> torch.Tensor:
        """Add the next token of the text; after its end, the mark of the end, and then padding."""
        spoken = [
            (self._pad if item else self._eos)
            if isinstance(item, int)
            else self._talker.text_projection(item[0])
            for item in items
        ]
        return rows + torch.stack(spoken)


class Codec:
    """Frames of codes to sound."""

    max_batch = 8

    def __init__(self, model: Any) -> None:
        self._model = model.code2wav

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Make the sound of each chunk's fresh frames."""
        return [self._run(item) for item in items]

    def _run(self, item: Item) -> StatelessResult:
        assert item.chunk is not None
        codes, fresh = item.inputs["codes"], item.chunk.fresh
        if not fresh:
            return StatelessResult(outputs={"audio": torch.zeros(0), "frames": codes[:0]})
        context = (len(codes) - fresh) * self._model.total_upsample
        sound = self._model(codes.long().T[None])[0, 0, context:]
        return StatelessResult(outputs={"audio": sound.float(), "frames": codes[-fresh:]})


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Thinker | Talker | Codec:
    """Load a node."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    progress(1, 1, node)
    match node:
        case "thinker":
            return Thinker(node, model)
        case "talker":
            return Talker(node, model)
        case _:
            return Codec(model)
