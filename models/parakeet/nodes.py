"""The torch node of Parakeet: transformers' encoder with its CTC head, one window at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import ParakeetForCTC

from models.base import Item, StatelessResult
from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards
from models.transformers_lm.architecture import choose_dtype, config_of
from models.transformers_lm.tensors import load_weights
from shared.errors import BugError

ENCODER: Final = "encoder"


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "CtcEncoder":
    """Load `encoder` of a checkpoint folder in Hugging Face format; `kwargs` are not used.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node != ENCODER:
        raise BugError(f"parakeet has no node {node!r} with weights; it has {ENCODER!r}")
    config = config_of(ParakeetForCTC, read_json(checkpoint / "config.json"), checkpoint)
    shards, on = read_shards(checkpoint), torch.device(device)
    chosen = choose_dtype(dtype, on, shards)
    return CtcEncoder(load_weights(ParakeetForCTC, config, shards, on, chosen, progress))


class CtcEncoder:
    """The encoder as a stateless node (`models.base.StatelessNode`).

    Windows are computed one by one: padding to the longest of a batch would change their last bits.
    """

    max_batch: Final = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Of each item's `features`, (frames, bands), the likeliest token of each output frame.

        `ids` is (n,) int64, `logprobs` (n,) float32. The last of the features' frames is padding.
        """
        return [StatelessResult(outputs=self._encode(item.inputs["features"])) for item in items]

    def _encode(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.ones(1, len(features), dtype=torch.bool, device=features.device)
        mask[:, -1] = False
        logits = self._model(features[None].to(self._model.dtype), attention_mask=mask).logits[0].float()
        lengths = self._model._get_subsampling_output_length(mask.sum(-1))  # noqa: SLF001 - no public one
        chances = logits[: int(lengths[0])].log_softmax(-1)
        logprobs, ids = chances.max(dim=-1)
        return {"ids": ids, "logprobs": logprobs}
