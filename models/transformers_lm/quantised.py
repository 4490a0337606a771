"""Quantised weights of eight bits and of MXFP4, loaded as floats. Other quantised checkpoints are refused.

Only arithmetic is needed, so they run on every device without a library. They take the memory of floats, in
addition to the pages of the file. A weight is `(q - zero point) * scale`, with

    fp8                 q.weight: float8, q.weight_scale_inv: a scale per block of `weight_block_size`
    fbgemm_fp8          q.weight: float8, q.weight_scale: a scale per row
    compressed-tensors  q.weight: float8 or int8, or q.weight_packed: four int8 in an int32, with an offset;
                        q.weight_scale: one, a row's, or one per group of columns or per block;
                        q.weight_zero_point
    bitsandbytes        q.weight: int8, q.SCB: the largest absolute value of a row, stored as 127
    mxfp4               experts of four bits (`mxfp4`)

Activations are not quantised, even if the checkpoint has parameters for it: that serves 8-bit kernels, and
costs precision.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.checkpoints.weights import Shard, TensorInfo
from models.transformers_lm import mxfp4
from models.transformers_lm.mxfp4 import Mxfp4Parts

_SCALES: Final = MappingProxyType(
    {
        "fp8": "weight_scale_inv",
        "fbgemm_fp8": "weight_scale",
        "compressed-tensors": "weight_scale",
        "bitsandbytes": "SCB",
    }
)
"""The name of the tensor of scales, by method."""
_FORMATS: Final = frozenset({"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"})
"""The supported formats of compressed-tensors."""
_EIGHT_BITS: Final = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
_FLOATS: Final = frozenset({"F32", "F16", "BF16", "F8_E8M0"})
"""The dtypes of scales."""
_ITEM_BYTES: Final = MappingProxyType({"F32": 4, "F16": 2, "BF16": 2})
_PACKED: Final = "weight_packed"
_ZEROS: Final = "weight_zero_point"
_IGNORED: Final = frozenset(
    {"activation_scale", "input_scale", "input_zero_point", "input_scale_ub", "weight_shape", "weight_format"}
)
"""Tensors of activations, or with information that is known already."""
_INT8_OFFSET: Final = 128
_LARGEST_INT8: Final = 127


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors of one quantised weight, by their names in the files.

    Attributes:
        shape: the shape of the weight.
        block: the rows and columns that share a scale.
        divisor: of the scales.
    """

    weight: str
    scale: str
    zeros: str | None
    shape: tuple[int, int]
    block: tuple[int, int]
    divisor: int = 1

    @property
    def blocks(self) -> int:
        """The number of scales."""
        return ceil(self.shape[0] / self.block[0]) * ceil(self.shape[1] / self.block[1])

    @property
    def names(self) -> list[str]:
        return [self.weight, self.scale, *([self.zeros] if self.zeros is not None else [])]

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        stored = read(self.weight)
        if self.weight.endswith(_PACKED):
            # The first weight is the lowest byte of an int32, so the bytes are in order.
            stored = stored.view(torch.uint8)[:, : self.shape[1]]
            weight = stored.to(torch.float32).sub_(_INT8_OFFSET)
        else:
            weight = stored.to(torch.float32)
        if self.zeros is not None:
            weight -= self._spread(read(self.zeros))
        weight *= self._spread(read(self.scale)) / self.divisor
        return weight

    def _spread(self, stored: torch.Tensor) -> torch.Tensor:
        """Scales or zero points, expanded so that they broadcast with the weight."""
        rows, columns = self.shape
        high, wide = self.block
        found = stored.to(torch.float32).reshape(ceil(rows / high), ceil(columns / wide))
        if 1 < high < rows:
            found = found.repeat_interleave(high, 0)[:rows]
        return found.repeat_interleave(wide, 1)[:, :columns] if 1 < wide < columns else found


@dataclass(frozen=True, slots=True)
class _DequantisedSlice:
    """A quantised weight with the interface of a file's slice: it is read and computed when it is indexed."""

    parts: _Parts | Mxfp4Parts
    read: Callable[[str], torch.Tensor]

    def get_shape(self) -> list[int]:
        return list(self.parts.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.parts.floats(self.read)[index]


@dataclass(frozen=True, slots=True)
class Quantised:
    """The quantised weights of a checkpoint.

    Attributes:
        weights: their tensors, by the name of the weight in the model.
        spare: tensors of the files that have no place in the model.
    """

    weights: Mapping[str, _Parts | Mxfp4Parts]
    spare: frozenset[str]

    def as_floats(self, shards: Iterable[Shard]) -> list[Shard]:
        """The files as if the weights were stored in the dtype of the largest other tensor."""
        tensors = {name: one for shard in shards for name, one in shard.tensors.items()}
        rest = {name: one for name, one in tensors.items() if name not in self.spare | self.weights.keys()}
        floats = [one for one in rest.values() if one.dtype in _ITEM_BYTES]
        dtype = max(floats, key=lambda one: one.elements).dtype if floats else "BF16"
        weights = {
            name: TensorInfo(dtype, parts.shape, prod(parts.shape) * _ITEM_BYTES[dtype])
            for name, parts in self.weights.items()
        }
        return [Shard(Path(), 0, rest | weights)]

    def slices(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """The model's tensors by name, from slices of the files."""
        whole = {
            name: _DequantisedSlice(parts, lambda part: files[part][...])
            for name, parts in self.weights.items()
        }
        return {name: one for name, one in files.items() if name not in self.spare} | whole

    def sizes(self, stored: Mapping[str, int]) -> dict[str, int]:
        """The bytes that are read from the files for each of the model's tensors."""
        whole = {name: sum(stored[part] for part in parts.names) for name, parts in self.weights.items()}
        return {name: size for name, size in stored.items() if name not in self.spare} | whole


def quantised_of(raw: Mapping[str, Any], shards: Iterable[Shard], checkpoint: Path) -> Quantised | None:
    """The quantised weights of a checkpoint; None if it has none.

    Args:
        raw: the content of `config.json`.
        shards: the weight files; empty for a check of the configuration alone.
        checkpoint: the folder, for error messages.

    Raises:
        UnsupportedArchitectureError: the kind of quantisation is not supported.
        CheckpointError: a tensor is missing.
    """
    config = raw.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise CheckpointError(f"{checkpoint / 'config.json'}: quantization_config is no object")
    method = config.get("quant_method")
    if complaint := _complaint(config, method):
        raise UnsupportedArchitectureError(
            f"{checkpoint}: quantised weights of this kind are not served: {complaint}; expected 8-bit "
            f"weights by one of {', '.join(sorted(_SCALES))}, mxfp4, or the model's float weights"
        )
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    if method == mxfp4.METHOD:
        return _of_four_bits(tensors, checkpoint)
    weights: dict[str, _Parts | Mxfp4Parts] = {}
    spare = {name for name in tensors if name.rpartition(".")[2] in _IGNORED}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last == _ZEROS or (last != _PACKED and tensor.dtype not in _EIGHT_BITS):
            continue
        if last not in ("weight", _PACKED):
            raise UnsupportedArchitectureError(
                f"{checkpoint}: {name} is stored as {tensor.dtype}, and is not the matrix of a linear layer; "
                "expected the model's float weights"
            )
        weights[f"{module}.weight"] = parts = _parts_of(name, tensors, config, checkpoint)
        spare.update(parts.names)
    return Quantised(weights, frozenset(spare - weights.keys()))


def _of_four_bits(tensors: Mapping[str, TensorInfo], checkpoint: Path) -> Quantised:
    """The weights in MXFP4.

    Raises:
        CheckpointError: blocks and their scales do not fit each other.
    """
    weights: dict[str, _Parts | Mxfp4Parts] = {}
    for name, tensor in tensors.items():
        if not name.endswith(mxfp4.BLOCKS):
            continue
        scales = tensors.get(name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES)
        if not mxfp4.is_weight(tensor.shape, tensor.dtype, scales.shape if scales else None):
            raise CheckpointError(
                f"{checkpoint}: {name} is {tensor.dtype}{list(tensor.shape)} with scales of "
                f"{list(scales.shape) if scales else 'none'}, expected U8[experts, outputs, groups, 16] and "
                "a scale per group; are config.json and the weights of one checkpoint?"
            )
        weights[name.removesuffix(mxfp4.BLOCKS)] = Mxfp4Parts.of(name, tensor.shape)
    return Quantised(weights, frozenset(name for parts in weights.values() for name in parts.names))


def _parts_of(
    name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], checkpoint: Path
) -> _Parts:
    """The tensors of the quantised weight of that name.

    Raises:
        CheckpointError: one of them is missing, or has the wrong size.
    """
    tensor, method = tensors[name], config["quant_method"]
    module, _, last = name.rpartition(".")
    scale, zeros = f"{module}.{_SCALES[method]}", f"{module}.{_ZEROS}"
    is_stored_so = len(tensor.shape) == 2 and (last != _PACKED or tensor.dtype == "I32")
    if not is_stored_so or scale not in tensors or tensors[scale].dtype not in _FLOATS:
        raise CheckpointError(
            f"{checkpoint}: {name} is {tensor.dtype}{list(tensor.shape)}, expected a matrix"
            f"{' of I32' if last == _PACKED else ''}, and floats in {scale}; are config.json and "
            "the weights of one checkpoint?"
        )
    rows, columns = tensor.shape[0], tensor.shape[1] * (4 if last == _PACKED else 1)
    if not (rows and columns and tensors[scale].elements):
        raise CheckpointError(
            f"{checkpoint}: {name} is {rows} x {columns} with {tensors[scale].elements} numbers in {scale}, "
            "expected more than none; are config.json and the weights of one checkpoint?"
        )
    parts = _Parts(
        name,
        scale,
        zeros if zeros in tensors else None,
        (rows, columns),
        _block((rows, columns), tensors[scale].shape, next(iter(_configured_blocks(config)), None)),
        divisor=_LARGEST_INT8 if method == "bitsandbytes" else 1,
    )
    high, wide = parts.block
    for part in parts.names[1:]:
        if (found := tensors[part].elements) != parts.blocks:
            raise CheckpointError(
                f"{checkpoint}: {part} has {found} numbers, expected {parts.blocks}: one for each "
                f"{high} x {wide} of {rows} x {columns}; are config.json and the weights of one checkpoint?"
            )
    return parts


def _configured_blocks(config: Mapping[str, Any]) -> set[tuple[int, int]]:
    """The rows and columns that share a scale, as configured; the last block may be incomplete."""
    groups = (config.get("config_groups") or {}).values()
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups]
    found = (
        one.split("x") if isinstance(one, str) else one
        for one in (*structures, config.get("weight_block_size"))
    )
    return {(int(high), int(wide)) for high, wide in filter(None, found)}


def _block(
    shape: tuple[int, int], scales: tuple[int, ...], configured: tuple[int, int] | None
) -> tuple[int, int]:
    """The rows and columns of a weight that share a scale: as configured, or by the number of scales."""
    if prod(scales) == 1:
        return shape
    if configured is not None and scales not in ((shape[0],), (shape[0], 1)):
        return configured
    down, across = scales if len(scales) == 2 else (scales[0], 1)
    return max(1, shape[0] // down), max(1, shape[1] // across)


def _complaint(config: Mapping[str, Any], method: object) -> str | None:
    """The reason why such weights are not supported; None if they are."""
    if method == mxfp4.METHOD:
        return None
    if method not in _SCALES:
        return f"quant_method is {method!r}"
    if method == "bitsandbytes" and not config.get("load_in_8bit"):
        return "bitsandbytes without load_in_8bit"
    if method != "compressed-tensors":
        return None
    if config.get("kv_cache_scheme") is not None:
        return "kv_cache_scheme is set, but keys and values are stored as floats"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "sparsity_config is set"
    for name, group in (config.get("config_groups") or {}).items():
        stored, weights = group.get("format") or config.get("format"), group.get("weights") or {}
        if stored not in _FORMATS:
            return f"the format of {name} is {stored!r}"
        if weights.get("num_bits") != 8:
            return f"the weights of {name} have {weights.get('num_bits')} bits"
        if weights.get("actorder"):
            return f"the columns of {name} are in another order (actorder)"
        if stored == "pack-quantized" and not weights.get("symmetric", True):
            return f"{name} is packed and not symmetric"
    return "its groups have blocks of several sizes" if len(_configured_blocks(config)) > 1 else None
