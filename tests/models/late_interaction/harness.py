"""The nodes of a late-interaction model without a worker, and sentence-transformers as their oracle."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from models.base import EMBEDDING, SCORE, VECTORS, Item
from models.late_interaction import nodes, processing
from models.text_encoder.requests import TextsRequest
from shared.events import Inputs, Params

Vectors = npt.NDArray[np.float32]
QUERIES = ["red cat?", "the dog", "on the mat w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12"]
DOCUMENTS = ["a red cat, on the mat!", "dog", "w3 w4. w5 (w6) " * 12, "the cat"]


class Model:
    """The two nodes of a folder."""

    def __init__(self, folder: Path) -> None:
        self.processing = processing.load(folder, max_seq_len=4096)
        self.node = nodes.load(folder)

    def item(
        self,
        texts: Sequence[str | list[int]],
        queries: Sequence[str] = (),
        params: Params | None = None,
        **options: Any,
    ) -> Item:
        """The item of a request: for scores if there are queries, else for embeddings."""
        inputs = Inputs(
            texts=[*texts], queries=[*queries], output_modalities=[SCORE if queries else EMBEDDING]
        )
        chosen = msgspec.structs.replace(params or Params(), options=options)
        args = msgspec.to_builtins(TextsRequest(inputs=inputs, params=chosen))
        result = self.processing.run("prepare", "key", {}, args)
        return Item(inputs={name: torch.from_numpy(one) for name, one in result.outputs.items()}, args=args)

    def run(self, *items: Item) -> list[dict[str, Vectors]]:
        return [{name: one.numpy() for name, one in found.outputs.items()} for found in self.node.run(items)]  # type: ignore[union-attr]

    def embed(self, texts: Sequence[str | list[int]], *given: Any, **options: Any) -> list[Vectors]:
        """The vectors of each text."""
        [found] = self.run(self.item(texts, *given, **options))
        return np.split(found[EMBEDDING], np.cumsum(found[VECTORS])[:-1])

    def score(
        self, texts: Sequence[str], queries: Sequence[str], params: Params | None = None
    ) -> list[float]:
        [found] = self.run(self.item(texts, queries, params))
        return [float(one) for one in found[SCORE]]


@cache
def oracle(folder: Path) -> Any:
    """The folder in sentence-transformers."""
    from sentence_transformers import MultiVectorEncoder  # noqa: PLC0415 - seconds

    return MultiVectorEncoder(str(folder), device="cpu")
