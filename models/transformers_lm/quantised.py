"""Quantised weights, loaded as floats. Kinds of quantised checkpoints that are not known here are refused.

Only arithmetic is needed, so they run on every device without a library. They take the memory of floats, in
addition to the pages of the file. A weight is `(q - zero point) * scale`, with

    fp8                 q.weight: float8, q.weight_scale_inv: a scale per block of `weight_block_size`
    fbgemm_fp8          q.weight: float8, q.weight_scale: a scale per row
    compressed-tensors  q.weight: float8 or int8; q.weight_scale: one, a row's, or one per group of columns
                        or per block; q.weight_zero_point. Or q.weight_packed (`packed_integers`)
    gptq, awq           q.qweight (`packed_integers`)
    bitsandbytes        q.weight: int8, q.SCB: the largest absolute value of a row, stored as 127. Or four
                        bits (`four_bit_floats`)
    mxfp4               experts of four bits (`mxfp4`)
    torchao             q._weight_qdata (`torchao_tensors`)
    groups              q.weight_numbers (`grouped_files`)

Numbers of four and eight bits can also be had as they are stored (`Quantised.grouped`).

Activations are not quantised, even if the checkpoint has parameters for it: that serves 8-bit kernels, and
costs precision.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.checkpoints.weights import Shard, TensorInfo
from models.grouped_weights import GroupedWeight
from models.transformers_lm import grouped_files, mxfp4, torchao_tensors
from models.transformers_lm.four_bit_floats import FourBitParts, four_bit_parts, is_state
from models.transformers_lm.grouped_files import GroupedParts, grouped_parts
from models.transformers_lm.mxfp4 import Mxfp4Parts
from models.transformers_lm.packed_integers import LAYOUTS, PackedParts, group_sizes, packed_parts
from models.transformers_lm.scaled_numbers import ScaledParts
from models.transformers_lm.torchao_tensors import Int4Parts

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
_PACKED: Final = "pack-quantized"
_PACKED_BITS: Final = frozenset({2, 4, 8})
"""Those of numbers that do not lie across words."""
_ZEROS: Final = "weight_zero_point"
_IGNORED: Final = frozenset(
    {"activation_scale", "input_scale", "input_zero_point", "input_scale_ub", "weight_shape", "weight_format"}
)
"""Tensors of activations, or with information that is known already."""
_LARGEST_INT8: Final = 127


_AnyParts = ScaledParts | Mxfp4Parts | PackedParts | FourBitParts | GroupedParts | Int4Parts


@dataclass(frozen=True, slots=True)
class _DequantisedSlice:
    """A quantised weight with the interface of a file's slice: it is read and computed when it is indexed."""

    parts: _AnyParts
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

    weights: Mapping[str, _AnyParts]
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

    def grouped(
        self, files: Mapping[str, Any], *, with_floats: bool = False
    ) -> dict[str, Callable[[], GroupedWeight]]:
        """Return readers of the weights that are numbers in groups of 32, as they are stored.

        Floats of eight bits are among them only `with_floats`: the CPU kernels do not multiply them.
        They have the names of modules: `q` of `q.weight`. Matrices of merged experts have names of their own.
        """

        def read(part: str) -> torch.Tensor:
            found: torch.Tensor = files[part][...]
            return found

        readers: dict[str, Callable[[], GroupedWeight]] = {}
        for name, parts in self.weights.items():
            if isinstance(parts, Mxfp4Parts):
                readers |= parts.grouped(name, files)
            elif name.endswith(".weight") and (
                parts.is_grouped(read) or (with_floats and isinstance(parts, ScaledParts) and parts.is_float8)
            ):
                readers[name.removesuffix(".weight")] = partial(parts.grouped, read)
        return readers

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
    method = str(config.get("quant_method"))
    if complaint := _complaint(config, method):
        known = sorted({*_SCALES, *LAYOUTS, mxfp4.METHOD, torchao_tensors.METHOD})
        raise UnsupportedArchitectureError(
            f"{checkpoint}: quantised weights of this kind are not served: {complaint}; expected one of "
            f"{', '.join(known)}, or the model's float weights"
        )
    shards = list(shards)
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    if method == mxfp4.METHOD:
        return _of_four_bits(tensors, checkpoint)
    if method == grouped_files.METHOD:
        return _of_groups(tensors, checkpoint)
    if method == torchao_tensors.METHOD:
        return Quantised(*torchao_tensors.weights_in(shards, checkpoint))
    weights: dict[str, _AnyParts] = {}
    if bits := _packed_bits(config, method):
        weights |= {
            f"{name.rpartition('.')[0]}.weight": packed_parts(name, tensors, config, bits, checkpoint)
            for name in tensors
            if name.endswith(f".{LAYOUTS[method].words}")
        }
    paths = {name: shard.path for shard in shards for name in shard.tensors if is_state(name)}
    for name, path in paths.items():
        of_four_bits = four_bit_parts(name, tensors, path, checkpoint)
        weights[of_four_bits.weight] = of_four_bits
    spare = {name for name in tensors if name.rpartition(".")[2] in _IGNORED}
    spare.update(name for parts in weights.values() for name in parts.names)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last == _ZEROS or name in spare or method not in _SCALES or tensor.dtype not in _EIGHT_BITS:
            continue
        if last != "weight":
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
    weights: dict[str, _AnyParts] = {}
    for name, tensor in tensors.items():
        if not name.endswith(mxfp4.BLOCKS):
            continue
        scales = tensors.get(name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES)
        if not mxfp4.is_weight(tensor, scales):
            raise CheckpointError(
                f"{checkpoint}: {name} is {tensor.dtype}{list(tensor.shape)} with scales of "
                f"{f'{scales.dtype}{list(scales.shape)}' if scales else 'none'}, expected "
                "U8[experts, outputs, groups, 16] and a U8 per group; are config.json and the weights of one "
                "checkpoint?"
            )
        weights[name.removesuffix(mxfp4.BLOCKS)] = Mxfp4Parts.of(name, tensor.shape)
    return Quantised(weights, frozenset(name for parts in weights.values() for name in parts.names))


def _of_groups(tensors: Mapping[str, TensorInfo], checkpoint: Path) -> Quantised:
    of_experts = _of_four_bits(tensors, checkpoint)
    weights = dict(of_experts.weights)
    weights |= {
        f"{name.rpartition('.')[0]}.weight": grouped_parts(name, tensors, checkpoint)
        for name in tensors
        if name.endswith(f".{grouped_files.NUMBERS}")
    }
    return Quantised(weights, frozenset(name for parts in weights.values() for name in parts.names))


def _parts_of(
    name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], checkpoint: Path
) -> ScaledParts:
    """The tensors of the quantised weight of that name.

    Raises:
        CheckpointError: one of them is missing, or has the wrong size.
    """
    tensor, method = tensors[name], config["quant_method"]
    module = name.rpartition(".")[0]
    scale, zeros = f"{module}.{_SCALES[method]}", f"{module}.{_ZEROS}"
    if len(tensor.shape) != 2 or scale not in tensors or tensors[scale].dtype not in _FLOATS:
        raise CheckpointError(
            f"{checkpoint}: {name} is {tensor.dtype}{list(tensor.shape)}, expected a matrix, and floats in "
            f"{scale}; are config.json and the weights of one checkpoint?"
        )
    rows, columns = tensor.shape
    if not (rows and columns and tensors[scale].elements):
        raise CheckpointError(
            f"{checkpoint}: {name} is {rows} x {columns} with {tensors[scale].elements} numbers in {scale}, "
            "expected more than none; are config.json and the weights of one checkpoint?"
        )
    parts = ScaledParts(
        name,
        scale,
        zeros if zeros in tensors else None,
        (rows, columns),
        _block((rows, columns), tensors[scale].shape, config),
        divisor=_LARGEST_INT8 if method == "bitsandbytes" else 1,
        bits=8 if tensor.dtype == "I8" else None,
        is_e4m3=tensor.dtype == "F8_E4M3",
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


def _block(shape: tuple[int, int], scales: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int]:
    """The rows and columns of a weight that share a scale: as configured, or by the number of scales."""
    if prod(scales) == 1:
        return shape
    configured = next(iter(_configured_blocks(config)), None)
    if configured is not None and scales not in ((shape[0],), (shape[0], 1)):
        return configured
    down, across = scales if len(scales) == 2 else (scales[0], 1)
    # The last group may be incomplete, so the number of groups does not say their size.
    wide = next((size for size in group_sizes(config) if ceil(shape[1] / size) == across), shape[1] // across)
    return max(1, shape[0] // down), max(1, wide)


def _packed_bits(config: Mapping[str, Any], method: str) -> int | None:
    """The bits of the numbers that are packed; None if none are."""
    if method in ("gptq", "awq"):
        return int(config.get("bits") or config["w_bit"])
    groups = (config.get("config_groups") or {}).values()
    packed = [one for one in groups if (one.get("format") or config.get("format")) == _PACKED]
    return int(packed[0]["weights"]["num_bits"]) if packed else None


def _complaint(config: Mapping[str, Any], method: object) -> str | None:
    """The reason why such weights are not supported; None if they are."""
    match method:
        case "mxfp4" | "fp8" | "fbgemm_fp8" | torchao_tensors.METHOD | grouped_files.METHOD:
            return None
        case "bitsandbytes":
            has_either = config.get("load_in_8bit") or config.get("load_in_4bit")
            return None if has_either else "bitsandbytes without load_in_8bit or load_in_4bit"
        case "gptq":
            return _complaint_of_gptq(config)
        case "awq":
            return _complaint_of_awq(config)
        case "compressed-tensors":
            return _complaint_of_compressed(config)
        case _:
            return f"quant_method is {method!r}"


def _complaint_of_gptq(config: Mapping[str, Any]) -> str | None:
    if config.get("bits") not in _PACKED_BITS:
        return f"gptq with {config.get('bits')!r} bits"
    if (stored := config.get("checkpoint_format") or "gptq") not in ("gptq", "gptq_v2"):
        return f"the checkpoint_format of gptq is {stored!r}"
    for pattern, change in (config.get("dynamic") or {}).items():
        if not str(pattern).startswith("-") and "bits" in (change or {}):
            return f"the modules {pattern!r} have bits of their own (dynamic)"
    return None


def _complaint_of_awq(config: Mapping[str, Any]) -> str | None:
    if (bits := config.get("bits", config.get("w_bit"))) != 4:
        return f"awq with {bits!r} bits"
    if (version := str(config.get("version", "gemm")).lower()) != "gemm":
        return f"the version of awq is {version!r}"
    return "the backend of awq is 'llm-awq'" if config.get("backend") == "llm-awq" else None


def _complaint_of_compressed(config: Mapping[str, Any]) -> str | None:
    if config.get("kv_cache_scheme") is not None:
        return "kv_cache_scheme is set, but keys and values are stored as floats"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "sparsity_config is set"
    packed: set[object] = set()
    for name, group in (config.get("config_groups") or {}).items():
        stored, weights = group.get("format") or config.get("format"), group.get("weights") or {}
        if stored not in _FORMATS:
            return f"the format of {name} is {stored!r}"
        bits = weights.get("num_bits")
        if bits not in (_PACKED_BITS if stored == _PACKED else {8}):
            return f"the weights of {name} have {bits} bits"
        if stored == _PACKED:
            packed.add(bits)
        elif weights.get("actorder"):
            return f"the columns of {name} are in another order (actorder)"
    if len(packed) > 1:
        return "its groups are packed with several numbers of bits"
    return "its groups have blocks of several sizes" if len(_configured_blocks(config)) > 1 else None
