"""The torch nodes that the families of the kit have: `llm` and `vision_encoder`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from models.base import Peers
from models.checkpoints.progress import Progress, silent
from models.vision_language.decoder import VlmDecoder, examine_decoder, load_decoder
from models.vision_language.graph import ENCODER, LLM
from models.vision_language.tower import VisionEncoder, load_tower
from shared.errors import BugError


class Load(Protocol):
    """`nodes.load` of a family (`models.base`)."""

    def __call__(
        self,
        checkpoint: Path,
        node: str,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        progress: Progress = silent,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        peers: Peers | None = None,
    ) -> VlmDecoder | VisionEncoder: ...


def loader(encoder: Callable[[Any], VisionEncoder], decoder: type[VlmDecoder] = VlmDecoder) -> Load:
    """`nodes.load` of a family: `encoder` makes its tower of the model, its KV node is a `decoder`."""

    def load(
        checkpoint: Path,
        node: str,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        progress: Progress = silent,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        peers: Peers | None = None,
    ) -> VlmDecoder | VisionEncoder:
        """Load one node of a checkpoint folder in Hugging Face format.

        Raises:
            CheckpointError: a file of the folder is missing, damaged or unsupported.
            UnsupportedArchitectureError: the language model cannot be served over a paged pool.
        """
        if node == LLM:
            return load_decoder(
                checkpoint,
                LLM,
                device=device,
                dtype=dtype,
                progress=progress,
                peers=peers,
                node_class=decoder,
            )
        if node == ENCODER:
            return encoder(load_tower(checkpoint, device=device, dtype=dtype, progress=progress))
        raise BugError(f"expected the node {LLM!r} or {ENCODER!r}, found {node!r}")

    return load


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the language model's longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    return examine_decoder(checkpoint, members=members)
