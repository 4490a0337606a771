"""MXFP4: the numbers of the specification, and gpt-oss's experts in the published layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.checkpoints.files import CheckpointError
from models.transformers_lm.expert_layers import matrix_named
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.mxfp4 import Mxfp4Parts
from tests.tiny import write_checkpoint
from tests.tiny.model import EXPERTS

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def packed(experts: int, outputs: int, inputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales; numbers of about 0.2."""
    by = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=by).to(torch.uint8)
    scales = torch.randint(122, 125, (experts, outputs, inputs // 32), generator=by).to(torch.uint8)
    return blocks, scales


def four_bits(folder: Path) -> Path:
    """A tiny gpt-oss with experts in MXFP4, as published."""
    folder.mkdir()
    path = write_checkpoint(folder, "gpt_oss") / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            experts, inputs, outputs = tensors.pop(f"{at}.{name}").shape
            blocks, scales = packed(experts, outputs, inputs, seed=layer)
            tensors |= {f"{at}.{name}_blocks": blocks, f"{at}.{name}_scales": scales}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return folder


def test_numbers_are_those_of_the_specification() -> None:
    every = torch.arange(16, dtype=torch.uint8)
    blocks = (every | every << 4).view(1, 1, 1, 16)  # each number twice
    stored = {"w_blocks": blocks, "w_scales": torch.tensor([[[128]]], dtype=torch.uint8)}

    found = Mxfp4Parts.of("w_blocks", (1, 1, 1, 16)).floats(stored.__getitem__)

    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor([*positive, *(-number for number in positive)]).repeat_interleave(2) * 2
    assert torch.equal(found.view(-1), expected)


def test_weights_are_those_that_transformers_reads() -> None:
    blocks, scales = packed(3, 10, 64, seed=0)
    stored = {"w_blocks": blocks, "w_scales": scales}

    found = Mxfp4Parts.of("w_blocks", tuple(blocks.shape)).floats(stored.__getitem__)

    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


@pytest.mark.slow
def test_a_checkpoint_of_four_bits_has_the_weights_it_stands_for(tmp_path: Path) -> None:
    folder = four_bits(tmp_path / "four")
    node = load_decoder(folder, "llm", dtype="float32")

    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            stored = [tensors[f"{at}.{name}{end}"] for end in ("_blocks", "_scales")]
            weight = node.model.get_parameter(f"{at}.{name}")
            assert torch.equal(weight, convert_moe_packed_tensors(*stored, dtype=torch.float32))
            assert weight.std() > 0.1
    assert node.architecture == "GptOssForCausalLM"


@pytest.mark.slow
def test_each_matrix_of_an_expert_can_be_had_as_it_is_stored(tmp_path: Path) -> None:
    folder = four_bits(tmp_path / "four")
    expected = load_decoder(folder, "llm", dtype="float32").model.state_dict()

    node = load_decoder(folder, "llm", dtype="float32", leaves_weights=True)

    assert not node.is_filled
    experts = {name for name in expected if name.endswith(("gate_up_proj", "down_proj"))}
    for name in experts:
        assert node.model.get_parameter(name).untyped_storage().nbytes() == 4
    assert len(node.stored_weights) == 2 * EXPERTS * 3
    for name, read in node.stored_weights.items():
        weight, matrix = read(), matrix_named(node.model, name)
        assert (weight.bits, weight.shape) == (4, matrix.weight.shape)
        assert torch.equal(weight.floats(), node.left_floats[name]())
    node.fill()
    for name in experts:
        assert torch.equal(node.model.get_parameter(name), expected[name])


@pytest.mark.parametrize("damage", ["missing", "short", "dtype", "wide"])
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, damage: str) -> None:
    path = four_bits(tmp_path / "four") / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.experts.down_proj"
    if damage == "missing":
        del tensors[f"{name}_scales"]
    elif damage == "short":
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :-1].contiguous()
    elif damage == "wide":
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"].to(torch.bfloat16)
    else:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"].to(torch.int16)
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(
        CheckpointError, match=r"down_proj_blocks is .* expected U8\[experts, outputs, groups, 16\]"
    ):
        load_decoder(path.parent, "llm")
