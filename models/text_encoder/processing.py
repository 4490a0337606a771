"""The CPU node `prepare` of text encoders: texts, or token ids, to packed token ids. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.base import EMBEDDING, CpuResult, TextlessProcessing
from models.checkpoints.files import read_json_if_present
from models.text.embedding import DimensionsNotSupportedError
from models.text.tokenizer import load_tokenizer, vocab_size_of
from models.text_encoder import folder, requests
from models.text_encoder.folder import SentenceFolder
from models.text_encoder.graph import PREPARE, TextEncoderOptions
from models.text_encoder.tokens import Side, TextTokenizer, lower_cased
from shared.errors import BugError, ClientError
from shared.events import Inputs, Params
from shared.tensors import Handle

_KEPT_PROMPTS: Final = 256


def load(checkpoint: Path, *, max_seq_len: int) -> "TextEncoderProcessing":
    """Load the tokenizer and the settings of a folder.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    settings = folder.read(checkpoint)
    tokenizer, _ = load_tokenizer(checkpoint)
    if settings.lower_case:
        tokenizer = lower_cased(tokenizer)
    side: Side = (
        "left"
        if read_json_if_present(checkpoint / "tokenizer_config.json").get("truncation_side") == "left"
        else "right"
    )
    texts = TextTokenizer(tokenizer, vocab_size=vocab_size_of(checkpoint, tokenizer), side=side)
    return TextEncoderProcessing(settings, texts, max_seq_len=max_seq_len)


class TextEncoderProcessing(TextlessProcessing):
    """The CPU node of one folder. Re-entrant.

    Its outputs are `tokens`, (T,) int32, the token ids of all texts, and `lengths`, (texts, 2) int32: the
    tokens of each text, and how many of its first ones are not pooled.
    """

    def __init__(self, settings: SentenceFolder, texts: TextTokenizer, *, max_seq_len: int) -> None:
        self._settings = settings
        self._texts = texts
        self._longest = min(max_seq_len, settings.max_positions)
        self._prompt_tokens: dict[str, int] = {}

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != PREPARE:
            raise BugError(f"text_encoder has no CPU node {node!r}; it has {PREPARE!r}")
        request, options = requests.read(args, TextEncoderOptions)
        _check(request.inputs, request.params)
        self._check_dimensions(request.params.dimensions)
        prompt = self._prompt(options)
        given, names = requests.texts_of(request.inputs)
        limit, cut = self._limit(request.params)
        texts = [prompt + text if isinstance(text, str) else text for text in given]
        ids = self._texts.encode(texts, limit=limit, cut=cut, names=names)
        skipped = self._skipped(prompt)
        lengths = [
            (len(one), skipped if isinstance(text, str) else 0) for one, text in zip(ids, given, strict=True)
        ]
        return CpuResult(
            facts={"prompt_tokens": sum(map(len, ids))},
            outputs={
                "tokens": np.fromiter((id for one in ids for id in one), np.int32),
                "lengths": np.array(lengths, np.int32),
            },
        )

    def _prompt(self, options: TextEncoderOptions) -> str:
        if options.prompt is not None:
            return options.prompt
        name = options.prompt_name if options.prompt_name is not None else self._settings.default_prompt
        if options.prompt_name is not None and name not in self._settings.prompts:
            known = ", ".join(map(repr, self._settings.prompts)) or "none"
            raise ClientError(
                f"prompt_name: expected a prompt of this model, which has {known}; found {name!r:.80}"
            )
        return self._settings.prompts.get(name, "")

    def _skipped(self, prompt: str) -> int:
        """The number of first tokens of each text that are the prompt's and not pooled."""
        if self._settings.include_prompt or not prompt:
            return 0
        if prompt not in self._prompt_tokens:
            if len(self._prompt_tokens) >= _KEPT_PROMPTS:
                self._prompt_tokens.clear()
            self._prompt_tokens[prompt] = self._texts.count_without_end(prompt)
        return self._prompt_tokens[prompt]

    def _limit(self, params: Params) -> tuple[int, Side | None]:
        """The most tokens of a text, and the end at which longer ones are cut; None refuses them."""
        side = params.truncation_side or self._texts.side
        stated = min(self._longest, self._settings.max_tokens or self._longest)
        wanted = requests.truncated_to(params, self._longest)
        is_asked = params.truncate_prompt_tokens is not None or params.truncation_side is not None
        cuts = self._settings.truncates or is_asked
        return stated if wanted is None else wanted, side if cuts else None

    def _check_dimensions(self, wanted: int | None) -> None:
        size, sizes = self._settings.size, self._settings.sizes
        if wanted is None or wanted == size or (wanted < size and (sizes is None or wanted in sizes)):
            return
        expected = f"at most {size}" if sizes is None else f"one of {sorted({*sizes, size})}"
        raise DimensionsNotSupportedError(
            f"dimensions: expected {expected}, as this checkpoint says, found {wanted}"
        )


def _check(inputs: Inputs, params: Params) -> None:
    """Refuse what an encoder of texts cannot do.

    Raises:
        ClientError: the request asks for something else than embeddings of texts.
    """
    requests.refuse_chats(inputs, does="embeds texts", expected="text, texts or token_ids")
    requests.refuse_files(inputs)
    requests.refuse_queries(inputs, params, does="embeds texts")
    requests.refuse_outputs(inputs, {EMBEDDING}, makes="embeddings")
    requests.refuse_generation(params, result="an embedding is")
