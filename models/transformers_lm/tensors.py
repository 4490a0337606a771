"""A model's weights, read from safetensors through transformers' own renames, merges and ties. No pickle.

A file is mapped, and each tensor copied at most once. On a CPU in the dtype it is stored in it is not copied
at all: the weights are the file's pages, which all processes on the machine share. Where one is converted or
goes to a GPU, it does so by itself; no second model stands beside the one that is made.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import core_model_loading as transformers_loading
from transformers.integrations import accelerate as transformers_accelerate
from transformers.utils import logging as transformers_logging

from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import Progress
from models.checkpoints.weights import Shard
from models.transformers_lm.quantised import Quantised
from models.transformers_lm.sharding import Cut, cuts_of, floats_among

_RECOMPUTED: Final = "rotary_emb.inv_freq"
"""Stored by old checkpoints although it follows from `config.json`."""
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""What says by itself which number it is. Whole numbers stand for others, and nobody said for which."""
_MERGED: Final = re.compile(r"\.experts\.\d+\.")
"""In the names of matrices that are stored expert by expert, and become one of all experts."""


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
    quantised: Quantised | None = None,
) -> Any:
    """The model with its weights, through transformers' own renames, merges and ties.

    It gets the tensors and not the folder, so that it opens no file by itself. Of a class that is `sharded`
    only the member's part of each is read; what is `quantised` is read as floats.
    """
    transformers_logging.disable_progress_bar()
    folder, name_of_class = shards[0].path.parent, model_class.__name__
    sizes = {name: tensor.nbytes for shard in shards for name, tensor in shard.tensors.items()}
    slices: dict[str, Any] = {}
    for shard in shards:
        file: Any = safe_open(shard.path, framework="pt", device="cpu")
        slices |= {name: file.get_slice(name) for name in shard.tensors}
    if quantised is not None:
        sizes, slices = quantised.sizes(sizes), quantised.slices(slices)
    cuts = cuts_of(model_class, config, sizes)
    misfit = _code_among(model_class, config, shards, quantised) or _uncut(slices, cuts)
    if misfit:
        raise CheckpointError(f"the weights in {folder} do not fit {name_of_class}: {misfit}")
    sizes |= {name: sizes[name] // cut.size for name, cut in cuts.items()}
    counter = _Counter(sum(sizes.values()), progress)
    state = {
        name: _CountedSlice(name, sizes[name], one, counter, cuts.get(name)) for name, one in slices.items()
    }
    try:
        with _placing(in_turn=any(_MERGED.search(name) for name in sizes)):
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                device_map={"": device},
                local_files_only=True,
                ignore_mismatched_sizes=True,  # refused below, by name: transformers' own error names none
                output_loading_info=True,
            )
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {folder} do not fit {name_of_class}: {error}") from error
    if misfits := sorted(info["mismatched_keys"]):
        name, found, expected = misfits[0]
        whose = " in the part of one rank" if cuts else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit {name_of_class}: {len(misfits)} tensors have another shape, "
            f"{name} is {tuple(found)}, expected {tuple(expected)}{whose}; "
            "are config.json and the weights of one checkpoint?"
        )
    spare = {name for name in info["unexpected_keys"] if not name.endswith(_RECOMPUTED)}
    for names, what in ((info["missing_keys"], "lack"), (spare, "hold what has no place in")):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise CheckpointError(
                f"the weights in {folder} {what} {name_of_class}: "
                f"{len(names)} tensors, {listed}; are config.json and the weights of one checkpoint?"
            )
    return model.requires_grad_(requires_grad=False)


def _code_among(
    model_class: Any, config: Any, shards: list[Shard], quantised: Quantised | None
) -> str | None:
    """Which weight is stored in numbers that stand for others, and nobody says for which; None if none is."""
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    known = quantised.weights.keys() | quantised.spare if quantised is not None else frozenset[str]()
    codes = {
        name: tensor.dtype
        for name, tensor in tensors.items()
        if tensor.dtype not in _FLOATS and name not in known
    }
    for name in floats_among(model_class, config, codes) if codes else ():
        return (
            f"{name} is stored as {codes[name]}, expected floats, or a quantization_config in config.json "
            "that says what it stands for"
        )
    return None


def _uncut(slices: Mapping[str, Any], cuts: Mapping[str, Cut]) -> str | None:
    """Which tensor has no part for each member; None if all have."""
    for name, cut in cuts.items():
        shape = tuple(slices[name].get_shape())
        if not cut.fits(shape):
            return (
                f"{name} is {shape}, of which {cut.size} ranks cannot have a part each; are config.json and "
                "the weights of one checkpoint?"
            )
    return None


@contextmanager
def _placing(*, in_turn: bool) -> Iterator[None]:
    """Have transformers put tensors on a device by itself.

    It can, but as soon as it is told of a device it asks for `accelerate`, which it needs for several.

    Args:
        in_turn: read no tensor before the one before it is in the model. Its threads read ahead, which is
            faster, but what is read before it is merged is there twice.
    """
    placing, loading = transformers_accelerate, transformers_loading
    has_accelerate, says = placing.is_accelerate_available, loading.is_env_variable_true
    placing.is_accelerate_available = lambda *_: True
    loading.is_env_variable_true = lambda name: name == "HF_DEACTIVATE_ASYNC_LOAD" and in_turn
    try:
        yield
    finally:
        placing.is_accelerate_available, loading.is_env_variable_true = has_accelerate, says
