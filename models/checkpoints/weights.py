"""Weight files of a checkpoint: discovery and integrity checks. No torch.

Only safetensors is read, a format without executable content. A file's header determines its length, so
everything is checked before the first tensor is read: an incomplete download is one clear error and not a
crash during loading.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from models.checkpoints.files import CheckpointError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_MAX_HEADER_BYTES: Final = 100_000_000
_ITEM_BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_DIGESTED_PAGES: Final = 16
_PAGE_BYTES: Final = 4096


_Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[_Natural]
    data_offsets: tuple[_Natural, _Natural]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file; `dtype` in safetensors' spelling (`BF16`, `F32`)."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file that passed the checks.

    Attributes:
        metadata: what its header says besides, by any names.
    """

    path: Path
    nbytes: int
    tensors: dict[str, TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_shards(checkpoint: Path) -> list[Shard]:
    """Check the weight files of a folder in Hugging Face format; return them in order of their names.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or there are none.
    """
    single = checkpoint / SINGLE
    if single.is_file():
        return [read_shard(single)]
    index = checkpoint / INDEX
    if not index.is_file():
        others = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in checkpoint.glob(pattern)
        )
        found = f"found {', '.join(others)}; convert it with `save_pretrained`" if others else "found neither"
        raise CheckpointError(f"{checkpoint} has no weights: expected {SINGLE} or {INDEX}, {found}")
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{index} cannot be read: {error}; download it again") from error
    if not weight_map:
        raise CheckpointError(f"{index} names no file: its weight_map is empty; download it again")
    shards = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}: expected a file in the same folder")
        shards.append(read_shard(checkpoint / name))
    held = {tensor: shard.path.name for shard in shards for tensor in shard.tensors}
    for tensor, name in weight_map.items():
        if held.get(tensor) != name:
            raise CheckpointError(
                f"{checkpoint / name} lacks the tensor {tensor!r} that {INDEX} expects there; "
                "index and files are not of one checkpoint, download both again"
            )
    return shards


def read_shard(path: Path) -> Shard:
    """Read the header of a safetensors file, and check it against the file's size.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is no safetensors file: its header would be {length} bytes long"
                )
            if size < 8 + length:
                raise _cut_short(path, f"at least {8 + length}", size)
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; download it again") from error
    try:
        entries = msgspec.json.decode(header, type=dict[str, Any])
        metadata = msgspec.convert(entries.pop("__metadata__", None) or {}, dict[str, str])
        tensors = msgspec.convert(entries, dict[str, _Tensor])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read: {error}") from error
    expected = 8 + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
    if size != expected:
        raise _cut_short(path, str(expected), size)
    _check_layout(path, tensors)
    return Shard(
        path,
        size,
        {
            name: TensorInfo(t.dtype, tuple(t.shape), t.data_offsets[1] - t.data_offsets[0])
            for name, t in tensors.items()
        },
        metadata,
    )


def _check_layout(path: Path, tensors: dict[str, _Tensor]) -> None:
    """Check that each tensor has the length of its type and shape, and that there are no gaps."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, found = tensor.data_offsets[0], tensor.data_offsets[1] - tensor.data_offsets[0]
        bits = _ITEM_BITS.get(tensor.dtype)
        if bits is None:
            raise CheckpointError(
                f"{path} is damaged: tensor {name!r} is of the unknown type {tensor.dtype[:20]!r}"
            )
        if found * 8 != prod(tensor.shape) * bits or begin != end:
            raise CheckpointError(
                f"{path} is damaged: expected tensor {name!r}, {tensor.dtype}{tensor.shape}, from byte {end} "
                f"to {end + prod(tensor.shape) * bits // 8}, found it from {begin} to {begin + found}"
            )
        end = tensor.data_offsets[1]


def weights_digest(shards: Sequence[Shard]) -> str:
    """A cheap digest of the weights (hex): headers, sizes, and sixteen pages spread over each file.

    It distinguishes checkpoints in a few milliseconds; it does not detect tampering.
    """
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        digest.update(f"{shard.path.name}|{shard.nbytes}|".encode())
        with shard.path.open("rb") as file:
            digest.update(file.read(8 + struct.unpack("<Q", file.read(8))[0]))
            for page in range(_DIGESTED_PAGES):
                file.seek(shard.nbytes * page // _DIGESTED_PAGES)
                digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()


def _cut_short(path: Path, expected: str, found: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is not whole: expected {expected} bytes, found {found}; download it again"
    )
