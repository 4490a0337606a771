"""The CPU node `prepare` of late-interaction models: queries and texts to token ids. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer

from models.base import EMBEDDING, SCORE, VECTORS, CpuResult, TextlessProcessing
from models.checkpoints.files import CheckpointError
from models.late_interaction import folder
from models.late_interaction.folder import LateInteractionFolder
from models.late_interaction.graph import PREPARE, LateInteractionOptions
from models.text.embedding import DimensionsNotSupportedError
from models.text.tokenizer import load_tokenizer, vocab_size_of
from models.text_encoder import requests
from models.text_encoder.tokens import TextTokenizer, lower_cased
from shared.errors import BugError
from shared.events import Inputs, Params
from shared.tensors import Handle

Task = Literal["query", "document"]
Text = str | list[int]
_SHORTEST: Final = 1


def load(checkpoint: Path, *, max_seq_len: int) -> "LateInteractionProcessing":
    """Load the tokenizer and the settings of a folder.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    settings = folder.read(checkpoint)
    tokenizer, names = load_tokenizer(checkpoint)
    if settings.lower_case:
        tokenizer = lower_cased(tokenizer)
    mark_prefixes(tokenizer, settings.marks)
    return LateInteractionProcessing(
        settings,
        TextTokenizer(tokenizer, vocab_size=vocab_size_of(checkpoint, tokenizer)),
        longest=min(max_seq_len, settings.max_positions),
        filler=_filler(tokenizer, names, settings) if settings.expansion else None,
        skipped=_skipped(tokenizer, names, settings.mask.skiplist_words),
    )


def mark_prefixes(tokenizer: Tokenizer, marks: Sequence[str]) -> None:
    """Let prefixes that are tokens of the vocabulary be encoded as one token, wherever they are in a text.

    Others stay ordinary text: the model has no embedding for them.
    """
    for mark in marks:
        known = (text for text in (mark, mark.split()[0]) if tokenizer.token_to_id(text) is not None)
        found = next(known, None)
        if found is not None and tokenizer.encode(found, add_special_tokens=False).tokens != [found]:
            tokenizer.add_special_tokens([AddedToken(found, normalized=False, special=True)])


def _filler(tokenizer: Tokenizer, names: Mapping[str, str], settings: LateInteractionFolder) -> int:
    """The token that expands queries."""
    stated = settings.expansion.token if settings.expansion else None
    token = stated or names.get("mask_token") or names.get("eos_token") or ""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise CheckpointError(
            f"expected a token to expand queries with, the tokenizer's mask_token; found {token!r}"
        )
    return int(found)


def _skipped(tokenizer: Tokenizer, names: Mapping[str, str], words: Sequence[str]) -> frozenset[int]:
    """The tokens that do not count. Words that the vocabulary lacks have none."""
    unknown = names.get("unk_token")
    found = {tokenizer.token_to_id(word) for word in words}
    if unknown not in words:
        found.discard(tokenizer.token_to_id(unknown or ""))
    return frozenset(token for token in found if token is not None)


class LateInteractionProcessing(TextlessProcessing):
    """The CPU node of one folder. Re-entrant.

    Its outputs, of the queries and then of the texts, are `tokens`, (T,) int32, and `kept`, (T,) uint8: 1 for
    tokens whose vectors count; `lengths`, (texts, 2) int32: the tokens of a text, and how many of its first
    ones are seen by the others.

    Args:
        longest: the most tokens of a text.
        filler: the token that expands queries; None: they are not expanded.
        skipped: the tokens that do not count.
    """

    def __init__(
        self,
        settings: LateInteractionFolder,
        texts: TextTokenizer,
        *,
        longest: int,
        filler: int | None,
        skipped: frozenset[int],
    ) -> None:
        self._settings = settings
        self._texts = texts
        self._longest = longest
        self._filler = filler
        self._skipped = skipped

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != PREPARE:
            raise BugError(f"late_interaction has no CPU node {node!r}; it has {PREPARE!r}")
        request, options = requests.read(args, LateInteractionOptions)
        _check(request.inputs, request.params)
        queries = list(request.inputs.queries)
        texts, names = requests.texts_of(request.inputs)
        task: Task = "document" if queries else options.task
        groups = [
            (
                self._encoded(
                    queries, [f"queries[{n}]" for n in range(len(queries))], "query", request.params
                ),
                "query",
            ),
            (self._encoded(texts, names, task, request.params), task),
        ]
        return self._result(groups)

    def _result(self, groups: Sequence[tuple[list[list[int]], str]]) -> CpuResult:
        tokens: list[int] = []
        kept: list[int] = []
        lengths: list[tuple[int, int]] = []
        for texts, task in groups:
            for ids in texts:
                whole = self._expanded(ids) if task == "query" else ids
                is_seen_by_all = self._settings.expansion is None or self._settings.expansion.attend
                lengths.append((len(whole), len(whole) if is_seen_by_all else len(ids)))
                tokens += whole
                kept += [self._counts(token, task) for token in whole]
        return CpuResult(
            facts={"prompt_tokens": sum(len(ids) for texts, _ in groups for ids in texts)},
            outputs={
                "tokens": np.array(tokens, np.int32),
                "lengths": np.array(lengths, np.int32),
                "kept": np.array(kept, np.uint8),
            },
        )

    def _counts(self, token: int, task: str) -> bool:
        mask = self._settings.mask
        if task in mask.skiplist_tasks and token in self._skipped:
            return False
        return task == "query" or not mask.keep_only_token_ids or token in mask.keep_only_token_ids

    def _expanded(self, ids: list[int]) -> list[int]:
        expansion = self._settings.expansion
        if expansion is None or self._filler is None:
            return ids
        return ids + [self._filler] * (expansion.length - len(ids))

    def _encoded(
        self, texts: Sequence[Text], names: Sequence[str], task: Task, params: Params
    ) -> list[list[int]]:
        if not texts:
            return []
        prefix = self._settings.query_prefix if task == "query" else self._settings.document_prefix
        limit = self._limit(task, prefix, params)
        given = [prefix + text if isinstance(text, str) else text for text in texts]
        side = params.truncation_side or self._texts.side
        return self._texts.encode(given, limit=limit, cut=side, names=names)

    def _limit(self, task: Task, prefix: str, params: Params) -> int:
        """The most tokens of a text of a kind."""
        settings = self._settings
        stated = settings.query_tokens if task == "query" else settings.document_tokens
        limit = min(self._longest, stated or settings.max_tokens)
        if task == "query" and settings.expansion is not None:
            length = settings.expansion.length
            limit = length if settings.expansion.strategy == "fixed" else max(limit, length)
        wanted = requests.truncated_to(params, self._longest)
        if wanted is not None:
            limit = min(limit, wanted)
        if task == "document" and params.max_tokens_per_doc is not None:
            [around] = self._texts.encode([prefix], limit=self._longest, cut=None, names=["the prefix"])
            limit = min(limit, len(around) + max(_SHORTEST, params.max_tokens_per_doc))
        return limit


def _check(inputs: Inputs, params: Params) -> None:
    """Refuse what a late-interaction model cannot do.

    Raises:
        ClientError: the request asks for something else than vectors or scores of texts.
    """
    requests.refuse_chats(inputs, does="embeds and scores texts", expected="text or texts")
    requests.refuse_files(inputs)
    requests.refuse_outputs(inputs, {EMBEDDING, VECTORS, SCORE}, makes="embeddings and scores")
    if params.dimensions is not None:
        raise DimensionsNotSupportedError("dimensions: expected none: the vectors of tokens are not cut")
    requests.refuse_generation(params, result="vectors are")
