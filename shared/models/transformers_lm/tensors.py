"""A model's weights, read from safetensors through transformers' own renames, merges and ties. No pickle."""

from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from shared.models.checkpoint import CheckpointError
from shared.models.progress import Progress
from shared.models.transformers_lm.sharding import Cut, cuts_of
from shared.models.weights import Shard

_RECOMPUTED: Final = "rotary_emb.inv_freq"
"""Stored by old checkpoints although it follows from `config.json`."""


class _Counter:
    """Adds up what the loader's threads read."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._lock = Lock()
        self._done = 0

    def add(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total, name)


@dataclass(frozen=True, slots=True)
class _CountedSlice:
    """A tensor in a file, read when transformers' loader asks for it: all of it, or this member's part."""

    name: str
    nbytes: int
    slice: Any
    counter: _Counter
    cut: Cut | None = None

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor
        if self.cut is None:
            tensor = self.slice[index]
        else:
            tensor = self.cut.of(self.slice, tuple(self.slice.get_shape()))
        self.counter.add(self.nbytes, self.name)
        return tensor


def load_weights(
    model_class: Any,
    config: Any,
    shards: list[Shard],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Any:
    """The model with its weights, through transformers' own renames, merges and ties.

    It gets the tensors and not the folder, so that it opens no file by itself. Of a class that is `sharded`
    only the member's part of each is read.
    """
    transformers_logging.disable_progress_bar()
    sizes = {name: tensor.nbytes for shard in shards for name, tensor in shard.tensors.items()}
    cuts = cuts_of(model_class, config, sizes)
    sizes |= {name: sizes[name] // cut.size for name, cut in cuts.items()}
    counter = _Counter(sum(sizes.values()), progress)
    state: dict[str, _CountedSlice] = {}
    for shard in shards:
        file: Any = safe_open(shard.path, framework="pt", device="cpu")
        for name in shard.tensors:
            state[name] = _CountedSlice(name, sizes[name], file.get_slice(name), counter, cuts.get(name))
    try:
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below, by name: transformers' own error names none
            output_loading_info=True,
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {shards[0].path.parent} do not fit {model_class.__name__}: {error}"
        ) from error
    if wrong := sorted(info["mismatched_keys"]):
        name, found, expected = wrong[0]
        raise CheckpointError(
            f"the weights in {shards[0].path.parent} do not fit {model_class.__name__}: {len(wrong)} tensors "
            f"have another shape, {name} is {tuple(found)}, expected {tuple(expected)}; "
            "are config.json and the weights of one checkpoint?"
        )
    spare = {name for name in info["unexpected_keys"] if not name.endswith(_RECOMPUTED)}
    for names, what in ((info["missing_keys"], "lack"), (spare, "hold what has no place in")):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise CheckpointError(
                f"the weights in {shards[0].path.parent} {what} {model_class.__name__}: "
                f"{len(names)} tensors, {listed}; are config.json and the weights of one checkpoint?"
            )
    # To the device afterwards: transformers places tensors by itself only with `accelerate` installed.
    return model.to(device).requires_grad_(requires_grad=False)
