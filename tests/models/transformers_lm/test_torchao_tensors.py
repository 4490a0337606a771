"""Weights of torchao are the floats that they stand for, and integers are multiplied as they are stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.transformers_lm.loader import load_decoder
from tests.models.transformers_lm.quantised_checkpoints import (
    TORCHAO,
    Described,
    Stored,
    Tensors,
    dtype_of,
    quantised,
    torchao,
    torchao_floats,
    torchao_integers,
    torchao_pairs,
)

Store = Callable[[torch.Tensor], Stored]
INT4 = torchao("IntxUnpackedToInt8Tensor", group=32, target_dtype=dtype_of("int4"))
KINDS = [
    pytest.param(torchao_integers(8), torchao("Int8Tensor"), 8, id="int8"),
    pytest.param(
        torchao_integers(8, is_symmetric=True),
        torchao("Int8Tensor", act_quant_kwargs={"_type": "QuantizeTensorToInt8Kwargs"}),
        8,
        id="int8, symmetric",
    ),
    pytest.param(torchao_integers(4, 32), INT4, 4, id="int4 in bytes"),
    pytest.param(
        torchao_integers(3, 32),
        torchao("IntxUnpackedToInt8Tensor", group=32, target_dtype=dtype_of("int3")),
        4,
        id="int3 in bytes",
    ),
    pytest.param(torchao_pairs, torchao("Int4Tensor", group=32), 4, id="int4 in pairs"),
    pytest.param(torchao_floats, torchao("Float8Tensor", "qdata", "scale"), None, id="float8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("store", "described", "bits"), KINDS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_are_the_floats_they_stand_for(
    tmp_path: Path, store: Store, described: Described, bits: int | None, family: Any
) -> None:
    plain, stored = quantised(tmp_path, TORCHAO, store, family, described)

    expected = load_decoder(plain, "llm").model.state_dict()
    found = load_decoder(stored, "llm")

    assert found.model.state_dict().keys() == expected.keys()
    for name, tensor in found.model.state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=1e-6, atol=1e-7), name
    assert bool(found.stored_weights) == (bits is not None)
    for name, read in found.stored_weights.items():
        weight = read()
        assert weight.bits == bits
        if f"{name}.weight" in expected:
            assert torch.allclose(weight.floats(), expected[f"{name}.weight"], rtol=1e-5, atol=1e-6), name


def _written(tmp_path: Path, store: Store = torchao_pairs, described: Described | None = None) -> Path:
    return quantised(tmp_path, TORCHAO, store, "qwen3", described or torchao("Int4Tensor", group=32))[1]


def _change(folder: Path, change: Callable[[Tensors, dict[str, str]], None]) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


Q = "model.layers.0.self_attn.q_proj"


def _lose_a_scale(tensors: Tensors, _: dict[str, str]) -> None:
    del tensors[f"{Q}._weight_scale"]


def _lose_the_metadata(_: Tensors, metadata: dict[str, str]) -> None:
    del metadata[f"{Q}.weight"]


def _cut_a_scale(tensors: Tensors, _: dict[str, str]) -> None:
    tensors[f"{Q}._weight_scale"] = tensors[f"{Q}._weight_scale"][:, 1:].contiguous()


def _store_floats(tensors: Tensors, _: dict[str, str]) -> None:
    tensors[f"{Q}._weight_qdata"] = tensors[f"{Q}._weight_qdata"].float()


def _damage_the_metadata(_: Tensors, metadata: dict[str, str]) -> None:
    metadata[f"{Q}.weight"] = metadata[f"{Q}.weight"][:-5]


def _no_block_size(_: Tensors, metadata: dict[str, str]) -> None:
    metadata[f"{Q}.weight"] = metadata[f"{Q}.weight"].replace("block_size", "block")


def _block_of_none(_: Tensors, metadata: dict[str, str]) -> None:
    metadata[f"{Q}.weight"] = metadata[f"{Q}.weight"].replace("[1, 32]", "[1, 0]")


def _no_parts(_: Tensors, metadata: dict[str, str]) -> None:
    metadata[f"{Q}.weight"] = metadata[f"{Q}.weight"].replace('["qdata", "scale", "zero_point"]', "[]")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_lose_a_scale, "the files lack .*q_proj._weight_scale"),
        (_lose_the_metadata, "does not say what .*q_proj._weight_qdata is"),
        (_cut_a_scale, r"its scale is BF16\[\d+, \d+\], expected one for each 1 x 32"),
        (_store_floats, r"its numbers are F32.*expected a matrix of I8 or U8"),
        (_damage_the_metadata, "q_proj.weight is damaged"),
        (_no_block_size, "q_proj.weight is damaged: .*block_size"),
        (_block_of_none, "q_proj.weight is damaged: .*>= 1"),
        (_no_parts, r"it has \[\], expected"),
    ],
)
def test_damaged_files_are_an_error(
    tmp_path: Path, change: Callable[[Tensors, dict[str, str]], None], complaint: str
) -> None:
    folder = _written(tmp_path)
    _change(folder, change)

    with pytest.raises(CheckpointError, match=complaint):
        load_decoder(folder, "llm")


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        (torchao("Int4TilePackedTo4dTensor"), "is a Int4TilePackedTo4dTensor, which is not served"),
        (torchao("MXTensor", block_size=32), "is a MXTensor, which is not served"),
        (
            torchao("Int8Tensor", "qdata", "scale", "zero_point", "act_pre_scale"),
            "has act_pre_scale, which is not served",
        ),
        (
            torchao("IntxUnpackedToInt8Tensor", target_dtype=dtype_of("int16")),
            "has numbers of int16: expected int1 to int8",
        ),
    ],
)
def test_other_types_are_refused_by_name(tmp_path: Path, described: Described, complaint: str) -> None:
    folder = _written(tmp_path, torchao_integers(8), described)

    with pytest.raises(UnsupportedArchitectureError, match=complaint):
        load_decoder(folder, "llm")


def test_numbers_of_more_bits_than_told_are_an_error(tmp_path: Path) -> None:
    folder = _written(tmp_path, torchao_integers(8, 32), INT4)

    with pytest.raises(CheckpointError, match="expected integers of 4 bits"):
        next(iter(load_decoder(folder, "llm").stored_weights.values()))()
