"""The node `encoder` of text encoders: packed token ids to an embedding of each text."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from models.base import EMBEDDING, Item, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.text_encoder import folder
from models.text_encoder.graph import ENCODER
from models.text_encoder.head import Head, load_head
from models.text_encoder.items import CostsTokens, divided
from models.text_encoder.packed import PackedEncoder
from shared.errors import BugError


def load(
    checkpoint: Path,
    node: str = ENCODER,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "TextEncoder":
    """Load the encoder of a checkpoint folder in Hugging Face format; the family has no `kwargs` of its own.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node != ENCODER:
        raise BugError(f"text_encoder has no node {node!r} with weights; it has {ENCODER!r}")
    settings = folder.read(checkpoint)
    encoder = PackedEncoder.load(checkpoint, device=device, dtype=dtype, progress=progress)
    return TextEncoder(encoder, load_head(checkpoint, settings, encoder.device))


class TextEncoder(CostsTokens):
    """A stateless node (`models.base.StatelessNode`) that packs the texts of all waiting requests."""

    def __init__(self, encoder: PackedEncoder, head: Head) -> None:
        self._encoder = encoder
        self._head = head

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Embed the texts of each item: (texts, size), or (size,) of a request with a single `text`."""
        texts: list[list[int]] = []
        skipped: list[int] = []
        for item in items:
            lengths, of_prompt = item.inputs["lengths"].unbind(1)
            texts += divided(item.inputs["tokens"], lengths)
            skipped += of_prompt.tolist()
        vectors = iter(self._head(self._encoder.states(texts), skipped))
        return [
            StatelessResult(outputs={EMBEDDING: self._output(item, [*islice(vectors, count)])})
            for item, count in ((item, len(item.inputs["lengths"])) for item in items)
        ]

    def _output(self, item: Item, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        found = self._head.cut(torch.stack([*vectors]), item.args["params"].get("dimensions"))
        is_single = item.args["inputs"].get("texts") is None
        return found[0] if is_single else found
