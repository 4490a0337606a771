"""Loading of weights from safetensors, with transformers' own renames, merges and ties. No pickle.

Files are memory-mapped, and each tensor is copied at most once. On a CPU, in the stored dtype, it is not
copied: the weights are the pages of the file, which all processes of the machine share. Tensors are
converted, or moved to a GPU, one by one, so the model is never in memory twice.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import core_model_loading as transformers_loading
from transformers import modeling_utils as transformers_modeling
from transformers.integrations import accelerate as transformers_accelerate
from transformers.utils import logging as transformers_logging

from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import Progress
from models.checkpoints.weights import Shard
from models.transformers_lm.left_weights import with_placeholders
from models.transformers_lm.quantised import Quantised
from models.transformers_lm.renames import Renamed
from models.transformers_lm.sharding import Cut, cuts_of, floats_among

_RECOMPUTED: Final = "rotary_emb.inv_freq"
"""Tensors that old checkpoints store although they follow from `config.json`."""
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Floating-point dtypes. Integers are codes, whose meaning only a `quantization_config` has."""
_MERGED: Final = re.compile(r"\.experts\.\d+\.")
"""Part of the names of matrices that are stored per expert, and merged to one of all experts."""


class _Counter:
    """Sums the bytes that the loader's threads read."""

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
    """A tensor in a file, or this member's part, that is read when transformers' loader indexes it."""

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
    renamed: Renamed | None = None,
    left: Collection[str] = (),
) -> Any:
    """Load a model with its weights, by transformers' own renames, merges and ties.

    Transformers gets the tensors and not the folder, so it opens no file itself. For a `sharded` class only
    the member's part of each tensor is read; `quantised` weights are read as floats; `renamed` ones are
    stored under other names. Of the modules `left` the model gets placeholders.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    transformers_logging.disable_progress_bar()
    folder, name_of_class = shards[0].path.parent, model_class.__name__
    slices = slices_of(shards)
    if renamed is not None:
        shards, slices = renamed.shards(shards), renamed.slices(slices)
    sizes = {name: tensor.nbytes for shard in shards for name, tensor in shard.tensors.items()}
    if quantised is not None:
        sizes, slices = quantised.sizes(sizes), quantised.slices(slices)
    if left:
        slices = with_placeholders(slices, left, dtype, device)
        sizes = {name: sizes.get(name, 0) for name in slices}
    cuts = cuts_of(model_class, config, sizes)
    misfit = _undescribed_code(model_class, config, shards, quantised) or _indivisible(slices, cuts)
    if misfit:
        raise CheckpointError(f"the weights in {folder} do not fit {name_of_class}: {misfit}")
    sizes |= {name: sizes[name] // cut.size for name, cut in cuts.items()}
    counter = _Counter(sum(sizes.values()), progress)
    state = {
        name: _CountedSlice(name, sizes[name], one, counter, cuts.get(name)) for name, one in slices.items()
    }
    try:
        in_turn = any(_MERGED.search(name) for name in sizes)
        with _without_accelerate(in_turn=in_turn), nullcontext() if not left else _without_reserve():
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                device_map={"": device},
                local_files_only=True,
                ignore_mismatched_sizes=True,  # refused below: transformers' own error names no tensor
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


def slices_of(shards: list[Shard]) -> dict[str, Any]:
    """Return the tensors of files by name, each of which is read when it is indexed."""
    slices: dict[str, Any] = {}
    for shard in shards:
        file: Any = safe_open(shard.path, framework="pt", device="cpu")
        slices |= {name: file.get_slice(name) for name in shard.tensors}
    return slices


def _undescribed_code(
    model_class: Any, config: Any, shards: list[Shard], quantised: Quantised | None
) -> str | None:
    """The error for a weight that is stored as integers without a description; None if there is none."""
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
            "that describes it"
        )
    return None


def _indivisible(slices: Mapping[str, Any], cuts: Mapping[str, Cut]) -> str | None:
    """The error for a tensor that does not divide evenly; None if all do."""
    for name, cut in cuts.items():
        shape = tuple(slices[name].get_shape())
        if not cut.fits(shape):
            return (
                f"{name} is {shape}, of which {cut.size} ranks cannot have a part each; are config.json and "
                "the weights of one checkpoint?"
            )
    return None


@contextmanager
def _without_accelerate(*, in_turn: bool) -> Iterator[None]:
    """Let transformers move tensors to a device without `accelerate`.

    It asks for `accelerate` whenever a device is given, although it needs it only for several devices.

    Args:
        in_turn: read each tensor after the previous one is in the model. Reading ahead in threads is faster,
            but tensors that are read before they are merged are in memory twice.
    """
    placing, loading = transformers_accelerate, transformers_loading
    has_accelerate, says = placing.is_accelerate_available, loading.is_env_variable_true
    placing.is_accelerate_available = lambda *_: True
    loading.is_env_variable_true = lambda name: name == "HF_DEACTIVATE_ASYNC_LOAD" and in_turn
    try:
        yield
    finally:
        placing.is_accelerate_available, loading.is_env_variable_true = has_accelerate, says


@contextmanager
def _without_reserve() -> Iterator[None]:
    """Let transformers not allocate a GPU's memory for all floats of a model before it loads them."""
    reserve = transformers_modeling.caching_allocator_warmup
    transformers_modeling.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        transformers_modeling.caching_allocator_warmup = reserve
