"""Quantised weights of the published formats are the floats that they stand for."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.transformers_lm import architecture
from models.transformers_lm.loader import load_decoder
from tests.models.transformers_lm.quantised_checkpoints import (
    AWQ,
    FP8,
    GPTQ,
    NF4,
    NF4_CONFIG,
    W4A16,
    Stored,
    Tensors,
    awq,
    bitsandbytes,
    blocks_of_16,
    compressed,
    float8_by_one,
    float8_by_rows,
    four_bits,
    gptq,
    int8_with_zeros,
    packed_by_groups,
    packed_with_zeros,
    quantised,
    torn_blocks,
    written,
)
from tests.peers import Circle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "store"),
    [
        pytest.param(FP8, blocks_of_16, id="fp8, by blocks"),
        pytest.param({"quant_method": "fbgemm_fp8"}, float8_by_rows, id="fbgemm_fp8"),
        pytest.param(compressed("float-quantized", type="float"), float8_by_rows, id="compressed fp8"),
        pytest.param(compressed("float-quantized", type="float"), float8_by_one, id="one scale"),
        pytest.param(compressed("float-quantized", block_structure=[24, 24]), torn_blocks, id="torn blocks"),
        pytest.param(compressed("float-quantized", block_structure="24x24"), torn_blocks, id="as once told"),
        pytest.param(
            compressed("float-quantized", block_structure=[24, 24]), float8_by_rows, id="rows beside blocks"
        ),
        pytest.param(compressed("int-quantized", symmetric=False), int8_with_zeros, id="zero points"),
        pytest.param(compressed("pack-quantized", group_size=16), packed_by_groups, id="packed"),
        pytest.param({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes, id="SCB"),
        pytest.param(GPTQ, gptq(), id="gptq"),
        pytest.param(GPTQ | {"desc_act": True}, gptq(is_ordered=False), id="gptq, reordered"),
        pytest.param(GPTQ | {"bits": 8}, gptq(8), id="gptq, 8 bits"),
        pytest.param(GPTQ | {"bits": 2}, gptq(2), id="gptq, 2 bits"),
        pytest.param(GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(less=0), id="gptq_v2"),
        pytest.param(AWQ, awq, id="awq"),
        pytest.param(W4A16, packed_with_zeros(), id="w4a16, reordered"),
        pytest.param(W4A16, packed_with_zeros(groups=-1), id="w4a16"),
        pytest.param(NF4_CONFIG, four_bits(is_nested=False), id="nf4"),
        pytest.param(NF4_CONFIG, four_bits(is_nested=True), id="nf4, nested"),
    ],
)
def test_quantised_weights_are_the_floats_they_stand_for(
    tmp_path: Path, config: Mapping[str, Any], store: Callable[[torch.Tensor], Stored]
) -> None:
    plain, stored = quantised(tmp_path, config, store)

    expected = load_decoder(plain, "llm").model.state_dict()
    found = load_decoder(stored, "llm").model.state_dict()

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("groups", [{}, None])
def test_compressed_tensors_without_groups_are_not_packed(tmp_path: Path, groups: Any) -> None:
    config = compressed("int-quantized") | {"config_groups": groups}
    _, stored = quantised(tmp_path, config, int8_with_zeros)

    assert load_decoder(stored, "llm", device="meta").dtype is torch.float32


def test_the_bits_are_those_of_the_group_that_is_packed(tmp_path: Path) -> None:
    groups = {
        "first": {"format": "int-quantized", "weights": {"num_bits": 8}},
        "second": {"format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 32}},
    }
    _, stored = quantised(tmp_path, compressed("mixed") | {"config_groups": groups}, packed_with_zeros())

    assert load_decoder(stored, "llm", device="meta").dtype is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(("config", "store"), [(FP8, blocks_of_16), (GPTQ, gptq()), (AWQ, awq)])
def test_experts_and_members_parts_are_read_from_quantised_weights_too(
    tmp_path: Path, config: Mapping[str, Any], store: Callable[[torch.Tensor], Stored]
) -> None:
    plain, stored = quantised(tmp_path, config, store, "qwen3_moe")
    expected, found = (
        load_decoder(folder, "llm", peers=Circle(2).members()[1]).model.state_dict()
        for folder in (plain, stored)
    )

    assert all(torch.allclose(found[name], tensor, rtol=1e-6, atol=0) for name, tensor in expected.items())


def test_what_they_are_computed_in_off_the_cpu_is_what_the_rest_is_stored_in(tmp_path: Path) -> None:
    _, stored = quantised(tmp_path, FP8, blocks_of_16)
    tensors = load_file(stored / "model.safetensors")
    half = {name: one.half() if one.dtype == torch.float32 else one for name, one in tensors.items()}
    save_file(half, stored / "model.safetensors", metadata={"format": "pt"})

    assert load_decoder(stored, "llm", device="meta").dtype is torch.float16
    assert load_decoder(stored, "llm").dtype is torch.float32


@pytest.mark.slow
def test_what_fits_a_cpu_is_reckoned_with_the_floats_and_not_with_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, stored = quantised(tmp_path, compressed("pack-quantized", group_size=16), packed_by_groups)
    elements = sum(one.numel() for one in load_file(plain / "model.safetensors").values())

    monkeypatch.setattr(architecture, "CPU_FLOAT32_BYTES", 4 * elements)
    assert load_decoder(stored, "llm").dtype is torch.float32
    monkeypatch.setattr(architecture, "CPU_FLOAT32_BYTES", 4 * elements - 1)
    assert load_decoder(stored, "llm").dtype is torch.bfloat16


def test_progress_counts_what_is_read_of_the_files(tmp_path: Path) -> None:
    _, stored = quantised(tmp_path, FP8, blocks_of_16)
    seen: list[tuple[int, int]] = []
    load_decoder(stored, "llm", progress=lambda done, total, _: seen.append((done, total)))
    size = sum(one.nbytes for one in load_file(stored / "model.safetensors").values())

    assert seen[-1] == (size, size)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        (GPTQ | {"bits": 3}, "gptq with 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "the checkpoint_format of gptq is 'marlin'"),
        (
            GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
            r"the modules '\+:\.\*down\.\*' have bits of their own",
        ),
        (AWQ | {"bits": 8}, "awq with 8 bits"),
        (AWQ | {"version": "gemv"}, "the version of awq is 'gemv'"),
        (AWQ | {"backend": "llm-awq"}, "the backend of awq is 'llm-awq'"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes without load_in_8bit or load_in_4bit"),
        (compressed("pack-quantized", num_bits=3), "the weights of group_0 have 3 bits"),
        (compressed("int-quantized", num_bits=4), "the weights of group_0 have 4 bits"),
        (compressed("int-quantized", actorder="group"), "the columns of group_0 are in another order"),
        (
            compressed("pack-quantized")
            | {"config_groups": {str(bits): {"weights": {"num_bits": bits}} for bits in (4, 8)}},
            "its groups are packed with several numbers of bits",
        ),
        (compressed("nvfp4-pack-quantized"), "the format of group_0 is 'nvfp4-pack-quantized'"),
        (
            compressed("float-quantized")
            | {
                "config_groups": {
                    name: {"weights": {"num_bits": 8, "block_structure": [size, size]}}
                    for name, size in (("group_0", 64), ("group_1", 128))
                }
            },
            "its groups have blocks of several sizes",
        ),
        (compressed("int-quantized") | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
        (compressed("int-quantized") | {"sparsity_config": {"format": "24"}}, "sparsity_config is set"),
    ],
)
def test_other_quantised_weights_are_refused_by_name(
    tmp_path: Path, config: Mapping[str, Any], why: str
) -> None:
    checkpoint = written(tmp_path / "it", "qwen3")
    told = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(told | {"quantization_config": dict(config)}))

    with pytest.raises(UnsupportedArchitectureError, match=f"{why}.*; expected one of awq, bitsandbytes, "):
        load_decoder(checkpoint, "llm")


def _without_scale(tensors: Tensors) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def _with_too_few(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(2, 2)


def _without_numbers(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(0)


def _with_bytes(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name].to(torch.uint8)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_without_scale, r"up_proj.weight is F8_E4M3\[\d+, \d+\], expected .*weight_scale_inv"),
        (_with_too_few, r"weight_scale_inv has 4 numbers, expected \d+: one for each 16 x 16 of"),
        (_without_numbers, r"up_proj.weight is \d+ x \d+ with 0 numbers in .*expected more than none"),
        (_with_bytes, "expected a matrix, and floats in .*weight_scale_inv"),
    ],
)
def test_scales_that_do_not_fit_are_told_before_anything_is_read(
    tmp_path: Path, damage: Callable[[Tensors], None], why: str
) -> None:
    _, stored = quantised(tmp_path, FP8, blocks_of_16)
    tensors = load_file(stored / "model.safetensors")
    damage(tensors)
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=why):
        load_decoder(stored, "llm")


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("config", "store", "name", "change", "why"),
    [
        (GPTQ, gptq(), "scales", lambda one: one[:1], r"qzeros is I32\[2, 16\], expected 16 of"),
        (GPTQ, gptq(), "scales", lambda one: one[:, :-8], "scales is .*, expected a scale for each of"),
        (GPTQ, gptq(), "scales", None, "expected a matrix of I32, and floats in .*scales"),
        (GPTQ, gptq(), "qzeros", None, "qzeros is missing: expected the zero points of"),
        (GPTQ, gptq(), "qzeros", lambda one: one[:, 1:], r"qzeros is I32\[.*\], expected \d+ of I32"),
        (GPTQ, gptq(), "g_idx", lambda one: one + 1, "g_idx names the group 2, expected less than 2"),
        (AWQ, awq, "qweight", lambda one: one.float(), "qweight is F32.*, expected a matrix of I32"),
        (NF4_CONFIG, four_bits(is_nested=False), "weight.absmax", None,
         "expected 128 of F32 in .*absmax, found none"),
        (NF4_CONFIG, four_bits(is_nested=True), "weight.quant_state.bitsandbytes__nf4", lambda one: one[:-1],
         "bitsandbytes__nf4 cannot be read"),
    ],
)  # fmt: skip
def test_damaged_four_bit_weights_are_told(
    tmp_path: Path,
    config: Mapping[str, Any],
    store: Callable[[torch.Tensor], Stored],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    why: str,
) -> None:
    _, stored = quantised(tmp_path, config, store)
    tensors = load_file(stored / "model.safetensors")
    whole = tensors.pop(UP + name)
    if change is not None:
        tensors[UP + name] = change(whole).contiguous()
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=why):
        load_decoder(stored, "llm")


def test_weights_are_packed_in_words_of_32_bits_and_in_no_others(tmp_path: Path) -> None:
    _, stored = quantised(tmp_path, compressed("pack-quantized", group_size=16), packed_by_groups)
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_packed"
    tensors[name] = tensors[name].to(torch.int64)
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"weight_packed is I64\[.*\], expected a matrix of I32"):
        load_decoder(stored, "llm")


@pytest.mark.parametrize(
    ("config", "store", "bits", "is_symmetric"),
    [
        pytest.param(GPTQ, gptq(), 4, False, id="gptq"),
        pytest.param(GPTQ | {"bits": 8}, gptq(8), 8, False, id="gptq, 8 bits"),
        pytest.param(GPTQ | {"bits": 2}, gptq(2), 4, False, id="gptq, 2 bits"),
        pytest.param(AWQ, awq, 4, False, id="awq"),
        pytest.param(W4A16, packed_with_zeros(groups=-1), 4, False, id="w4a16"),
        pytest.param({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes, 8, True, id="SCB"),
        pytest.param(compressed("int-quantized", symmetric=False), int8_with_zeros, 8, False, id="int8"),
    ],
)
def test_integers_can_be_had_as_they_are_stored(
    tmp_path: Path, config: Any, store: Callable[[torch.Tensor], Stored], bits: int, is_symmetric: bool
) -> None:
    plain, folder = quantised(tmp_path, config, store)
    expected = load_file(plain / "model.safetensors")

    weights = {name: read() for name, read in load_decoder(folder, "llm").stored_weights.items()}

    assert {f"{name}.weight" for name in weights} == {name for name in expected if "_proj" in name}
    for name, weight in weights.items():
        assert (weight.bits, weight.minimums is None) == (bits, is_symmetric)
        torch.testing.assert_close(weight.floats(), expected[f"{name}.weight"].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_nested", [False, True])
def test_indices_into_a_table_can_be_had_as_they_are_stored(tmp_path: Path, is_nested: bool) -> None:
    plain, folder = quantised(tmp_path, NF4_CONFIG, four_bits(is_nested=is_nested))
    expected = load_file(plain / "model.safetensors")

    weights = {name: read() for name, read in load_decoder(folder, "llm").stored_weights.items()}

    assert {f"{name}.weight" for name in weights} == {name for name in expected if "_proj" in name}
    for name, weight in weights.items():
        assert weight.bits == 4
        assert weight.values is not None
        assert len(set(weight.values)) == len(NF4)
        torch.testing.assert_close(weight.floats(), expected[f"{name}.weight"].float(), rtol=1e-4, atol=1e-6)


def int8_in_groups_of_48(weight: torch.Tensor) -> Stored:
    """The last group of 64 inputs has sixteen."""
    group = torch.arange(weight.shape[1]) // 48
    scale = torch.stack(
        [weight[:, group == one].abs().amax(1) / 127 for one in range(int(group.max()) + 1)], 1
    )
    stored = (weight / scale[:, group]).round()
    return {"weight": stored.to(torch.int8), "weight_scale": scale}, stored * scale[:, group]


@pytest.mark.slow
def test_a_last_group_may_be_incomplete(tmp_path: Path) -> None:
    plain, stored = quantised(
        tmp_path,
        compressed("int-quantized", num_bits=8, group_size=48, strategy="group"),
        int8_in_groups_of_48,
    )
    ids = torch.arange(20)

    found, expected = (load_decoder(one, "llm", dtype="float32").reference(ids) for one in (stored, plain))

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "store"),
    [
        pytest.param(GPTQ | {"desc_act": True}, gptq(is_ordered=False), id="reordered"),
        pytest.param(compressed("pack-quantized", group_size=16), packed_by_groups, id="smaller groups"),
        pytest.param({"quant_method": "fbgemm_fp8"}, float8_by_rows, id="floats"),
    ],
)
def test_others_are_floats_only(tmp_path: Path, config: Any, store: Callable[[torch.Tensor], Stored]) -> None:
    _, folder = quantised(tmp_path, config, store)

    weights = load_decoder(folder, "llm").stored_weights

    assert not weights
