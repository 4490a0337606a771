"""The CPU node `prepare` of rerankers: queries and texts to packed token ids. No torch."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.base import SCORE, CpuResult, TextlessProcessing
from models.checkpoints.files import read_json_if_present
from models.reranker import folder
from models.reranker.graph import PREPARE, RerankerOptions
from models.reranker.judging import JudgePrompts
from models.reranker.pairs import Limits, Pair, PairTokenizer, Side
from models.reranker.templates import TemplatePrompts, is_rendered
from models.text.tokenizer import load_tokenizer
from models.text_encoder import requests
from shared.errors import BugError, ClientError
from shared.events import Inputs, Params
from shared.tensors import Handle

Prompts = JudgePrompts | TemplatePrompts


def load(checkpoint: Path, *, max_seq_len: int) -> "RerankerProcessing":
    """Load the tokenizer and the settings of a folder.

    Raises:
        CheckpointError: a file is missing or malformed, or the model is no reranker.
    """
    settings = folder.read(checkpoint)
    tokenizer, names = load_tokenizer(checkpoint)
    pairs: Prompts | PairTokenizer
    if settings.answers is not None or (not settings.is_judge and is_rendered(checkpoint)):
        pairs = TemplatePrompts.read(checkpoint, tokenizer, names)
    elif not settings.is_judge:
        pairs = PairTokenizer(tokenizer, prompt=settings.prompt)
    else:
        pairs = JudgePrompts(tokenizer)
    cut = read_json_if_present(checkpoint / "tokenizer_config.json").get("truncation_side")
    return RerankerProcessing(
        pairs,
        max_tokens=min(max_seq_len, settings.max_tokens),
        side="left" if cut == "left" else "right",
    )


class RerankerProcessing(TextlessProcessing):
    """The CPU node of one folder. Re-entrant.

    Its outputs are `tokens` and `types`, (T,) int32, the token ids of all pairs and their types, and
    `lengths`, (pairs,) int32.
    """

    def __init__(self, pairs: PairTokenizer | Prompts, *, max_tokens: int, side: Side) -> None:
        self._pairs: Final = pairs
        self._max_tokens: Final = max_tokens
        self._side: Final[Side] = side

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != PREPARE:
            raise BugError(f"reranker has no CPU node {node!r}; it has {PREPARE!r}")
        request, options = requests.read(args, RerankerOptions)
        _check(request.inputs, request.params)
        texts = _strings(request.inputs.texts or (), "texts")
        queries = _strings(request.inputs.queries, "queries")
        if len(queries) == 1:
            queries *= len(texts)
        found = self._encoded(queries, texts, self._limits(request.params), options)
        lengths = [len(pair.ids) for pair in found]
        return CpuResult(
            facts={"prompt_tokens": sum(lengths)},
            outputs={
                "tokens": np.fromiter(chain.from_iterable(pair.ids for pair in found), np.int32),
                "types": np.fromiter(chain.from_iterable(pair.types for pair in found), np.int32),
                "lengths": np.array(lengths, np.int32),
            },
        )

    def _encoded(
        self, queries: Sequence[str], texts: Sequence[str], limits: Limits, options: RerankerOptions
    ) -> list[Pair]:
        if not isinstance(self._pairs, PairTokenizer):
            return self._pairs.encode(queries, texts, limits, options.instruction)
        if options.instruction is not None:
            raise ClientError(
                "instruction: expected none, because this model is a cross-encoder, which reads a query and "
                "a text alone",
                code="not_supported",
            )
        return self._pairs.encode(queries, texts, limits)

    def _limits(self, params: Params) -> Limits:
        """The limits of a request: longer pairs are always cut."""
        wanted = requests.truncated_to(params, self._max_tokens)
        tokens = self._max_tokens if wanted is None else wanted
        return Limits(tokens, params.max_tokens_per_doc, params.truncation_side or self._side)


def _strings(found: Sequence[str | list[int]], name: str) -> list[str]:
    """Texts, none of which is given as token ids: only the tokenizer knows the special tokens of a pair."""
    for index, one in enumerate(found):
        if not isinstance(one, str):
            raise ClientError(f"{name}[{index}]: expected a text, found token ids; a reranker reads texts")
    return [one for one in found if isinstance(one, str)]


def _check(inputs: Inputs, params: Params) -> None:
    """Refuse what a reranker cannot do.

    Raises:
        ClientError: the request asks for something else than scores of texts.
    """
    requests.refuse_files(inputs)
    if not inputs.texts or not inputs.queries:
        raise ClientError("this model scores texts against a query: expected texts and queries")
    requests.refuse_outputs(inputs, {SCORE}, makes="scores")
    requests.refuse_generation(params, result="a score is")
    if params.dimensions is not None:
        raise ClientError("dimensions: expected none, because a score has one")
