"""Quantised weights in files beside a checkpoint: the first start writes them, the next ones read them.

    CHECKPOINT/.dalsegno/quantised/int4-<digest>/0001.safetensors   the matrices of a layer, `grouped_files`
    CHECKPOINT/.dalsegno/quantised/int4-<digest>/index.json         their names, and the measured error

The digest is that of everything the numbers follow from. A folder gets its name when it is whole. Until then
it is called `….partial`, and is locked by the process that writes it: of several that start together, one
writes. What a killed one has left is removed by the next.

Whatever happens to these files, a model is served: what cannot be read is quantised again, what cannot be
written is not kept, and the log says why.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite, prod
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import save_file

from models.checkpoints.files import CONFIG as CONFIG_FILE
from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import read_shard
from models.grouped_weights import GROUP, GroupedWeight
from models.transformers_lm.grouped_files import CONFIG, tensors_of
from models.transformers_lm.quantised import quantised_of
from models.transformers_lm.tensors import slices_of
from workers.kv_engine.text_logits import Comparison

_LOGGER: Final = logging.getLogger(__name__)
_PLACE: Final = Path(".dalsegno", "quantised")
_INDEX: Final = "index.json"
_PARTIAL: Final = ".partial"
_FORM: Final = "1"
"""Another one lets all be quantised anew: change it with what `grouped.h` chooses, or with the files."""
_ROOM: Final = 2
"""Files are written if the disk has room for so many times their size."""
_SCALE_BITS: Final = 32


class _Index(msgspec.Struct, frozen=True):
    """The content of a folder: the names of matrices, and their error, if it was measured."""

    matrices: list[str]
    error: Comparison | None


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of quantised numbers: all that decides them.

    Attributes:
        checkpoint: its folder. Its configuration counts, and the names, sizes and times of its weight files.
        node: the name of the node.
        weights: the digest of its weights, which is that of a sample of them.
        dtype: of the floats that are rounded.
        bits: of the numbers, 4 or 8.
        calibration: see `Quantisation`.
        measured: see `Quantisation`.
    """

    checkpoint: Path
    node: str
    weights: str
    dtype: torch.dtype
    bits: int
    calibration: tuple[int, ...]
    measured: tuple[int, ...]

    def folder(self) -> Path:
        """Return the place of the files.

        Raises:
            OSError: the checkpoint cannot be read.
        """
        told = (_FORM, self.node, self.weights, self.dtype, self.calibration, self.measured)
        digest = blake2b(repr(told).encode(), digest_size=8)
        digest.update((self.checkpoint / CONFIG_FILE).read_bytes())
        for path in sorted(self.checkpoint.glob("*.safetensors")):
            found = path.stat()
            digest.update(f"|{path.name}|{found.st_size}|{found.st_mtime_ns}".encode())
        return self.checkpoint / _PLACE / f"int{self.bits}-{digest.hexdigest()}"


class KeptWeights:
    """Reads the quantised matrices of a model from its folder, or writes them as they are quantised.

    Args:
        origin: decides the folder.
        shapes: (outputs, inputs) of every matrix that may be quantised, by name.

    Raises:
        OSError: a file of the checkpoint cannot be read.

    Attributes:
        is_whole: the matrices are read; nothing is quantised.
        error: the measured error of what is read; None if it was not measured.
    """

    def __init__(self, origin: Origin, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._lock: int | None = None  # first, for `__del__`
        self._folder: Final = origin.folder()
        self._shapes: Final = shapes
        self._readers: dict[str, Callable[[], GroupedWeight]] = {}
        self._unwritten: dict[str, torch.Tensor] = {}
        self._names: Final[set[str]] = set()
        self.error: Comparison | None = None
        self.is_whole: Final = self._open()
        if not self.is_whole and not self._is_there:
            self._begin(
                sum(prod(shape) for shape in shapes.values()) * (origin.bits + _SCALE_BITS // GROUP) // 8
            )

    def get(self, name: str) -> GroupedWeight | None:
        """Return a matrix; None if it has to be quantised."""
        if (read := self._readers.get(name)) is None:
            return None
        weight, inputs = read(), self._shapes[name][1]
        return replace(weight, numbers=weight.numbers[:, :inputs].contiguous())

    def add(self, name: str, weight: GroupedWeight) -> None:
        """Keep a matrix, if the files are being written. `flush` writes it."""
        if self._lock is None or name in self._names:
            return
        self._names.add(name)
        filled = torch.nn.functional.pad(weight.numbers, (0, -weight.shape[1] % GROUP))
        self._unwritten |= tensors_of(f"{name}.weight", replace(weight, numbers=filled))

    def flush(self) -> None:
        """Write what was added since the last time."""
        if self._lock is None or not self._unwritten:
            return
        number = len(list(self._partial.glob("*.safetensors")))
        path = self._partial / f"{number:04}.safetensors"
        try:
            save_file(self._unwritten, path)
            path.chmod(self._partial.stat().st_mode & 0o666)  # else only this user could read it
        except Exception as error:  # noqa: BLE001 - safetensors has errors of its own for a full disk
            self._give_up(error)
        self._unwritten = {}

    def finish(self, error: Comparison | None) -> None:
        """Give the folder its name: all matrices are in it."""
        self.flush()
        if self._lock is None:
            return
        if error is not None and not (isfinite(error.perplexity) and isfinite(error.float_perplexity)):
            error = None  # JSON has no such number, so later starts do not tell it
        try:
            (self._partial / _INDEX).write_bytes(msgspec.json.encode(_Index(sorted(self._names), error)))
            self._partial.rename(self._folder)
        except OSError as problem:
            self._give_up(problem)
            return
        self._unlock()
        _LOGGER.info("quantised weights are kept for the next start in %s", self._folder)

    @property
    def _partial(self) -> Path:
        return self._folder.with_name(self._folder.name + _PARTIAL)

    def _open(self) -> bool:
        """Find the matrices in the folder; False if there is none, or if it is damaged."""
        if not self._is_there:
            return False
        try:
            index = msgspec.json.decode((self._folder / _INDEX).read_bytes(), type=_Index)
            self._readers = self._readers_of(index)
        except (OSError, msgspec.MsgspecError, CheckpointError) as error:
            _LOGGER.warning(
                "weights are quantised again, because those that were kept cannot be read: %s", error
            )
            if _is_damage(error):
                shutil.rmtree(self._folder, ignore_errors=True)
            return False
        self.error = index.error
        _LOGGER.info("quantised weights are read from %s", self._folder)
        return True

    @property
    def _is_there(self) -> bool:
        return os.path.lexists(self._folder)

    def _readers_of(self, index: _Index) -> dict[str, Callable[[], GroupedWeight]]:
        """Raises CheckpointError: files are damaged, or are not those of the index or of the model."""
        shards = [read_shard(path) for path in sorted(self._folder.glob("*.safetensors"))]
        quantised = quantised_of({"quantization_config": dict(CONFIG)}, shards, self._folder)
        assert quantised is not None
        names = set(index.matrices)
        found = {name.removesuffix(".weight"): parts.shape for name, parts in quantised.weights.items()}
        expected = {
            name: (shape[0], -(-shape[1] // GROUP) * GROUP)
            for name, shape in self._shapes.items()
            if name in names
        }
        if found != expected or expected.keys() != names:
            raise CheckpointError(
                f"{self._folder} has {len(found)} matrices, expected the {len(index.matrices)} of its "
                f"{_INDEX} in the shapes of the model"
            )
        return quantised.grouped(slices_of(shards))

    def _begin(self, nbytes: int) -> None:
        """Lock an empty folder to write into, if possible."""
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(self._partial).free) < _ROOM * nbytes:
                self._partial.rmdir()
                raise OSError(f"{nbytes / 1e9:.1f} GB are too much for a disk with {free / 1e9:.1f} GB free")
            self._lock = self._locked()
        except OSError as error:
            self._give_up(error)

    def _locked(self) -> int | None:
        """A lock of the empty folder; None if another process writes, or has written."""
        lock = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), self._partial.stat()):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            os.close(lock)
            return None
        for left in self._partial.iterdir():
            left.unlink()
        return lock

    def _give_up(self, problem: Exception) -> None:
        _LOGGER.info("quantised weights are not kept for the next start in %s: %s", self._folder, problem)
        if self._lock is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def __del__(self) -> None:
        self._unlock()


def _is_damage(error: Exception) -> bool:
    """True unless a file is there and only cannot be read now, or by this user."""
    reason = error.__cause__ if isinstance(error, CheckpointError) else error
    return not isinstance(reason, OSError) or isinstance(reason, FileNotFoundError)
