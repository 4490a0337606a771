"""The nodes of a reranker without a worker, and the published scores as their oracle."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from models.base import SCORE, Item, StatelessResult
from models.reranker import nodes, processing
from models.text_encoder.requests import TextsRequest
from shared.events import Inputs, Params
from tests.tiny.encoders import WORDS

Scores = npt.NDArray[np.float32]


def some_texts(*lengths: int, seed: int = 0) -> list[str]:
    """Texts of these numbers of words."""
    draws = Random(seed)
    return [" ".join(draws.choice(WORDS) for _ in range(length)) for length in lengths]


QUERY = "the red cat"
TEXTS = some_texts(3, 9, 1, 20, 90, 9, 2)


class Reranker:
    """The two nodes of a folder."""

    def __init__(self, folder: Path, *, max_seq_len: int = 4096) -> None:
        self.processing = processing.load(folder, max_seq_len=max_seq_len)
        self.node = nodes.load(folder)

    def item(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        params: Params | None = None,
        **options: Any,
    ) -> Item:
        """The item of a request."""
        inputs = Inputs(texts=[*texts], queries=[*queries], output_modalities=[SCORE])
        chosen = msgspec.structs.replace(params or Params(), options=options)
        args = msgspec.to_builtins(TextsRequest(inputs=inputs, params=chosen))
        result = self.processing.run("prepare", "key", {}, args)
        tensors = {name: torch.from_numpy(array) for name, array in result.outputs.items()}
        return Item(inputs=tensors, args=args)

    def run(self, *items: Item) -> list[Scores]:
        found = self.node.run(items)
        return [one.outputs[SCORE].numpy() for one in found if isinstance(one, StatelessResult)]

    def score(self, query: str, texts: Sequence[str], params: Params | None = None, **options: Any) -> Scores:
        [found] = self.run(self.item([query], texts, params, **options))
        return found


@cache
def reranker(folder: Path) -> Reranker:
    return Reranker(folder)


@cache
def cross_encoder(folder: Path) -> Any:
    """The folder in sentence-transformers."""
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - seconds

    return CrossEncoder(str(folder), device="cpu")


def predicted(folder: Path, query: str, texts: Sequence[str], **options: Any) -> Scores:
    """The scores of `CrossEncoder.predict`."""
    return np.asarray(cross_encoder(folder).predict([(query, text) for text in texts], **options))


@torch.inference_mode()
def judged(folder: Path, query: str, texts: Sequence[str], *, room: int = 8192, task: str = "") -> Scores:
    """Qwen3-Reranker's published example: one prompt at a time, the share of yes beside no."""
    from tokenizers import Tokenizer  # noqa: PLC0415
    from transformers import Qwen3ForCausalLM  # noqa: PLC0415 - a second

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    behind = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = task or "Given a web search query, retrieve relevant passages that answer the query"
    first, last = tokenizer.encode(before).ids, tokenizer.encode(behind).ids
    found = []
    for text in texts:
        asked = tokenizer.encode(f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {text}").ids
        ids = [*first, *asked[: room - len(first) - len(last)], *last]
        logits = model(torch.tensor([ids])).logits[0, -1]
        both = logits[[tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]]
        found.append(float(both.log_softmax(-1)[1].exp()))
    return np.array(found, np.float32)
