"""The nodes of a text encoder without a worker, and sentence-transformers as their oracle."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from models.base import EMBEDDING, Item
from models.text_encoder import nodes, processing
from models.text_encoder.requests import TextsRequest
from shared.events import Inputs, Params
from tests.tiny.encoders import WORDS

Vectors = npt.NDArray[np.float32]


def some_texts(*lengths: int, seed: int = 0) -> list[str]:
    """Texts of these numbers of words."""
    draws = Random(seed)
    return [" ".join(draws.choice(WORDS) for _ in range(length)) for length in lengths]


TEXTS = some_texts(3, 9, 1, 20, 50, 9, 0, 2)


class Encoder:
    """The two nodes of a folder."""

    def __init__(self, folder: Path, *, max_seq_len: int = 4096) -> None:
        self.processing = processing.load(folder, max_seq_len=max_seq_len)
        self.node = nodes.load(folder)

    def item(
        self,
        texts: Sequence[str | list[int]] | str,
        params: Params | None = None,
        **options: Any,
    ) -> Item:
        """The item of a request: of several texts, or of a single one."""
        given = {"text": texts} if isinstance(texts, str) else {"texts": [*texts]}
        chosen = msgspec.structs.replace(params or Params(), options=options)
        request = TextsRequest(inputs=Inputs(**given, output_modalities=[EMBEDDING]), params=chosen)
        args = msgspec.to_builtins(request)
        result = self.processing.run("prepare", "key", {}, args)
        inputs = {name: torch.from_numpy(array) for name, array in result.outputs.items()}
        return Item(inputs=inputs, args=args)

    def run(self, *items: Item) -> list[Vectors]:
        return [result.outputs[EMBEDDING].numpy() for result in self.node.run(items)]  # type: ignore[union-attr]

    def embed(
        self, texts: Sequence[str | list[int]], params: Params | None = None, **options: Any
    ) -> Vectors:
        [found] = self.run(self.item(texts, params, **options))
        return found


@cache
def oracle(folder: Path) -> Any:
    """The folder in sentence-transformers."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - seconds

    return SentenceTransformer(str(folder), device="cpu")


def encoded(folder: Path, texts: Sequence[str], **options: Any) -> Vectors:
    """The vectors of sentence-transformers' `encode`."""
    return np.asarray(oracle(folder).encode([*texts], **options))
