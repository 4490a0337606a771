"""Tiny checkpoints with quantised weights in the published formats, written here number by number."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import Family, write_checkpoint

Tensors = dict[str, torch.Tensor]
Stored = tuple[Tensors, torch.Tensor]
"""The tensors of one quantised weight, by the ends of their names, and its float weight."""


def blocks_of_16(weight: torch.Tensor) -> Stored:
    """The format of DeepSeek and Qwen, with smaller blocks. The last blocks may be incomplete."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 16), -(-columns // 16), generator=torch.Generator().manual_seed(1)) + 0.5
    meant, stored = torch.empty_like(weight), torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(16 * row, 16 * row + 16), slice(16 * column, 16 * column + 16)
            stored[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn).float()
            meant[block] = stored[block] * scales[row, column]
    return {"weight": stored.to(torch.float8_e4m3fn), "weight_scale_inv": scales}, meant


def torn_blocks(weight: torch.Tensor) -> Stored:
    """Blocks that do not divide the matrix: their size cannot be derived from their number."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 24), -(-columns // 24), generator=torch.Generator().manual_seed(1)) + 0.5
    scale = scales.repeat_interleave(24, 0)[:rows].repeat_interleave(24, 1)[:, :columns]
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scale


def float8_by_rows(weight: torch.Tensor) -> Stored:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    stored = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def float8_by_one(weight: torch.Tensor) -> Stored:
    stored = (weight / 0.5).to(torch.float8_e4m3fn)
    scales = {"weight_scale": torch.tensor([0.5]), "input_scale": torch.tensor([2.0])}
    return {"weight": stored, **scales}, stored.float() * 0.5


def int8_with_zeros(weight: torch.Tensor) -> Stored:
    scale, zero = weight.abs().amax(1, keepdim=True) / 100, torch.tensor(7, dtype=torch.int8)
    stored = (weight / scale + zero).round().to(torch.int8)
    zeros = zero.expand(weight.shape[0], 1).contiguous()
    meant = (stored.float() - 7) * scale
    return {"weight": stored, "weight_scale": scale, "weight_zero_point": zeros}, meant


def packed_by_groups(weight: torch.Tensor) -> Stored:
    """Four int8 in an int32, the first in the lowest byte, with an offset of 128; a scale per 16 columns."""
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // 16, 16)
    scale = (grouped.abs().amax(2) / 127).to(torch.bfloat16)
    stored = (grouped / scale.float()[..., None]).round().clamp(-128, 127)
    unsigned = (stored.view(rows, columns // 4, 4) + 128).to(torch.int64)
    packed = sum(unsigned[..., place] << 8 * place for place in range(4))
    tensors = {
        "weight_packed": torch.as_tensor(packed).to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, (stored * scale.float()[..., None]).view(rows, columns)


def bitsandbytes(weight: torch.Tensor) -> Stored:
    largest = weight.abs().amax(1)
    stored = (weight * 127 / largest[:, None]).round().to(torch.int8)
    beside = {"SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": stored, **beside}, stored.float() * (largest[:, None] / 127)


def _packed(numbers: torch.Tensor, bits: int, axis: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Unsigned numbers in words of 32 bits; `order[i]` is the number in place i of a word."""
    each = 32 // bits
    order = order or range(each)
    lines = numbers.to(torch.int64).movedim(axis, 0)
    lines = torch.cat([lines, lines.new_zeros(-len(lines) % each, *lines.shape[1:])])
    words = [sum(lines[at + number] << bits * place for place, number in enumerate(order))
             for at in range(0, len(lines), each)]  # fmt: skip
    joined = torch.stack([torch.as_tensor(word) for word in words])
    signed = torch.where(joined >= 2**31, joined - 2**32, joined)
    return signed.to(torch.int32).movedim(0, axis).contiguous()


def _grouped(weight: torch.Tensor, bits: int, group: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers (outputs, inputs), zero points and scales (outputs, groups), and what they mean."""
    draw = torch.Generator().manual_seed(1)
    count = int(group.max()) + 1
    zeros = torch.randint(1, 2**bits, (weight.shape[0], count), generator=draw)
    largest = torch.stack([weight[:, group == one].abs().amax(1) for one in range(count)], dim=1)
    scale = (largest / 2 ** (bits - 1)).half()
    numbers = (weight / scale[:, group].float() + zeros[:, group]).round().clamp(0, 2**bits - 1)
    return numbers, zeros, scale, (numbers - zeros[:, group]) * scale[:, group].float()


def gptq(bits: int = 4, *, less: int = 1, is_ordered: bool = True) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        group = torch.arange(weight.shape[1]) // 32
        if not is_ordered:
            group = group[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(2))]
        numbers, zeros, scale, meant = _grouped(weight, bits, group)
        tensors = {
            "qweight": _packed(numbers.T, bits, 0),
            "qzeros": _packed(zeros.T - less, bits, 1),
            "scales": scale.T.contiguous(),
            "g_idx": group.to(torch.int32),
        }
        return tensors, meant

    return store


def awq(weight: torch.Tensor) -> Stored:
    interleaved = (0, 2, 4, 6, 1, 3, 5, 7)
    numbers, zeros, scale, meant = _grouped(weight, 4, torch.arange(weight.shape[1]) // 32)
    tensors = {
        "qweight": _packed(numbers.T, 4, 1, interleaved),
        "qzeros": _packed(zeros.T, 4, 1, interleaved),
        "scales": scale.T.contiguous(),
    }
    return tensors, meant


def packed_with_zeros(*, groups: int | None = None) -> Callable[[torch.Tensor], Stored]:
    """Four bits of compressed-tensors; `groups`: what `weight_g_idx` has everywhere."""

    def store(weight: torch.Tensor) -> Stored:
        group = torch.arange(weight.shape[1]) // 32
        if groups is None:
            group = group.flip(0)
        numbers, zeros, scale, meant = _grouped(weight, 4, group)
        tensors = {
            "weight_packed": _packed(numbers, 4, 1),
            "weight_zero_point": _packed(zeros, 4, 0),
            "weight_scale": scale,
            "weight_g_idx": group.to(torch.int32) if groups is None else torch.full_like(group, groups).int(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, meant

    return store


NF4 = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.6, 0.7, 1.0])


def four_bits(*, is_nested: bool) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        blocks = weight.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
        beside: Tensors = {"weight.quant_map": NF4.clone(), "weight.absmax": absmax}
        if is_nested:
            table = torch.linspace(-1, 1, 256)
            nested = torch.tensor([2.0] * -(-absmax.numel() // 16))
            stored = ((absmax - 0.5) / 2 * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
            absmax = table[stored.long()] * 2 + 0.5
            state |= {"nested_blocksize": 16, "nested_offset": 0.5, "nested_dtype": "float32"}
            beside |= {
                "weight.absmax": stored,
                "weight.nested_absmax": nested,
                "weight.nested_quant_map": table,
            }
        indices = (blocks / absmax[:, None]).unsqueeze(-1).sub(NF4).abs().argmin(-1)
        meant = (NF4[indices] * absmax[:, None]).view(weight.shape)
        high, low = indices.flatten()[::2], indices.flatten()[1::2]
        told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        packed = (high * 16 + low).to(torch.uint8)[:, None]
        return {"weight": packed, "weight.quant_state.bitsandbytes__nf4": told, **beside}, meant

    return store


def torchao_integers(
    bits: int, group: int | None = None, *, is_symmetric: bool = False
) -> Callable[[torch.Tensor], Stored]:
    """A number in a byte; a scale and a zero point of a group of inputs, or of a row."""

    def store(weight: torch.Tensor) -> Stored:
        wide = group or weight.shape[1]
        groups = weight.view(weight.shape[0], -1, wide)
        scale = (groups.abs().amax(2) / 2 ** (bits - 1)).to(torch.bfloat16)
        zero = torch.full_like(scale, 0 if is_symmetric else 1, dtype=torch.int8)
        least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        each, shift = scale.float()[..., None], zero[..., None]
        numbers = (groups / each + shift).round().clamp(least, most)
        tensors = {"_weight_qdata": numbers.view(weight.shape).to(torch.int8), "_weight_scale": scale}
        return tensors | {"_weight_zero_point": zero}, ((numbers - shift) * each).view(weight.shape)

    return store


def torchao_pairs(weight: torch.Tensor) -> Stored:
    """Two numbers of four bits in a byte; scales and zeros are floats, (groups, outputs)."""
    groups = weight.view(weight.shape[0], -1, 32)
    least = groups.amin(2)
    scale = ((groups.amax(2) - least) / 15).to(torch.bfloat16)
    zero = (least + 8 * scale.float()).to(torch.bfloat16)
    numbers = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
    meant = numbers * scale.float()[..., None] + zero.float()[..., None]
    signed = numbers.view(weight.shape).to(torch.int16) & 15
    pairs = (signed[:, ::2] | signed[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    tensors = {"_weight_scale": scale.T.contiguous(), "_weight_zero_point": zero.T.contiguous()}
    return {"_weight_qdata": pairs} | tensors, meant.view(weight.shape)


def torchao_floats(weight: torch.Tensor) -> Stored:
    tensors, meant = float8_by_rows(weight)
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, meant


Described = Callable[[str, torch.Size], Any]
"""Returns the description of a weight in the metadata of a file, by its name and shape."""


def torchao(kind: str, *parts: str, group: int | None = None, **attributes: Any) -> Described:
    """The metadata of torchao's tensors; `parts` are their names."""

    def described(_: str, shape: torch.Size) -> dict[str, Any]:
        data = {"block_size": [1, group or shape[1]], **attributes}
        return {"_type": kind, "_data": data, "_tensor_data_names": parts or ["qdata", "scale", "zero_point"]}

    return described


def dtype_of(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
W4A16 = compressed("pack-quantized", num_bits=4, symmetric=False, group_size=32, actorder="group")
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def written(folder: Path, family: Family) -> Path:
    folder.mkdir()
    return write_checkpoint(folder, family)


def quantised(
    folder: Path,
    config: Mapping[str, Any],
    store: Callable[[torch.Tensor], Stored],
    family: Family = "qwen3",
    described: Described | None = None,
) -> tuple[Path, Path]:
    """A checkpoint with quantised projections, and one with their floats."""
    plain, stored = (written(folder / name, family) for name in ("plain", "stored"))
    floats = load_file(plain / "model.safetensors")
    files: Tensors = {}
    metadata = {"format": "pt"}
    for name, weight in list(floats.items()):
        module = name.removesuffix(".weight")
        if described is not None:
            metadata[name] = json.dumps({"_type": "Tensor"})
        if module.endswith("_proj") or ".experts." in module:
            if described is not None:
                metadata[name] = json.dumps(described(name, weight.shape))
            parts, floats[name] = store(weight)
            files |= {f"{module}.{end}": tensor for end, tensor in parts.items()}
        else:
            files[name] = weight
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(files, stored / "model.safetensors", metadata=metadata)
    told = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(told | {"quantization_config": dict(config)}))
    return plain, stored
