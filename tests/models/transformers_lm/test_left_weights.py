"""Weights that are left in the files: they take no memory, and can be had as floats."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from models.checkpoints.files import CheckpointError
from models.transformers_lm import loader
from models.transformers_lm.expert_layers import ExpertMatrix, matrix_named
from models.transformers_lm.left_weights import CLASSES_ON_GPU, with_placeholders
from models.transformers_lm.loader import load_decoder
from shared.errors import BugError
from tests.models.transformers_lm.quantised_checkpoints import (
    AWQ,
    GPTQ,
    NF4_CONFIG,
    Stored,
    awq,
    compressed,
    float8_by_rows,
    four_bits,
    gptq,
    int8_with_zeros,
    quantised,
    written,
)
from tests.peers import Circle
from tests.tiny import Family
from workers.kv_engine.kernel_models import _KINDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "store"),
    [
        ("qwen3", GPTQ, gptq()),
        ("qwen3", AWQ, awq),
        ("qwen3_moe", GPTQ, gptq()),
        ("qwen2_moe", GPTQ, gptq()),
        ("mixtral", GPTQ, gptq()),
        ("qwen3", NF4_CONFIG, four_bits(is_nested=True)),
    ],
)
def test_they_take_no_memory_until_they_are_filled(
    tmp_path: Path, family: Family, config: Mapping[str, Any], store: Callable[[torch.Tensor], Stored]
) -> None:
    _, folder = quantised(tmp_path, config, store, family)
    expected = load_decoder(folder, "llm").model.state_dict()

    node = load_decoder(folder, "llm", leaves_weights=True)

    left = {id(_parameter(node.model, name)) for name in node.stored_weights}
    for name, parameter in node.model.named_parameters():
        is_left = id(parameter) in left
        assert is_left == ("_proj" in name and "bias" not in name), name
        assert (parameter.untyped_storage().nbytes() == parameter.element_size()) == is_left, name
        assert parameter.shape == expected[name].shape
    node.fill()
    for name, tensor in node.model.state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=1e-6, atol=0), name


def _parameter(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """The parameter that holds the weight of a name in the files."""
    matrix = matrix_named(model, name)
    if isinstance(matrix, ExpertMatrix):
        kind = "down_proj" if matrix.part == "down" else "gate_up_proj"
        found: torch.nn.Parameter = getattr(matrix.experts, kind)
        return found
    return matrix.weight  # type: ignore[no-any-return] # of a linear layer


def test_some_can_remain(tmp_path: Path) -> None:
    _, folder = quantised(tmp_path, GPTQ, gptq())
    node = load_decoder(folder, "llm", leaves_weights=True)
    kept = "model.layers.1.mlp.up_proj"

    node.fill(but={kept})

    assert not node.is_filled
    empty = {name for name in node.stored_weights if not node.model.get_submodule(name).weight.any()}
    assert empty == {kept}


def test_placeholders_are_not_computed_with(tmp_path: Path) -> None:
    _, folder = quantised(tmp_path, GPTQ, gptq())
    node = load_decoder(folder, "llm", leaves_weights=True)

    with pytest.raises(BugError, match="llm: its weights are placeholders"):
        node.forward(torch.zeros(1, dtype=torch.int64), None)  # type: ignore[arg-type] # not reached


@pytest.mark.slow
@pytest.mark.parametrize(
    "stays_float", ["experts.0.up_proj", "experts.1.", "up_proj", "layers.0.mlp.experts"]
)
def test_some_experts_may_be_stored_as_floats(tmp_path: Path, stays_float: str) -> None:
    plain, folder = quantised(tmp_path, GPTQ, gptq(), "qwen3_moe")
    floats, files = (load_file(one / "model.safetensors") for one in (plain, folder))
    names = {name for name in floats if stays_float in name and "experts" in name}
    kept = {name: one for name, one in files.items() if f"{name.rpartition('.')[0]}.weight" not in names}
    save_file(kept | {name: floats[name] for name in names}, folder / "model.safetensors", {"format": "pt"})
    expected = load_decoder(folder, "llm").model.state_dict()

    node = load_decoder(folder, "llm", leaves_weights=True)

    assert node.left_floats.keys() - node.stored_weights.keys() == {
        name.removesuffix(".weight") for name in names
    }
    node.fill()
    for name, tensor in node.model.state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=1e-6, atol=0), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe"])
def test_experts_of_floats_are_not_merged_before_they_are_needed(tmp_path: Path, family: Family) -> None:
    folder = written(tmp_path / "it", family)
    expected = load_decoder(folder, "llm").model.state_dict()

    node = load_decoder(folder, "llm", leaves_weights=True, dtype="float32")

    assert not node.is_filled
    assert node.left_floats
    for name, parameter in node.model.named_parameters():
        assert (parameter.untyped_storage().nbytes() == 4) == (".experts." in name), name
    node.fill()
    for name, tensor in node.model.state_dict().items():
        assert torch.equal(tensor, expected[name].float()), name


def test_of_classes_without_kernels_everything_is_read(tmp_path: Path) -> None:
    assert load_decoder(written(tmp_path / "it", "deepseek_v3"), "llm", leaves_weights=True).is_filled


def test_a_layer_that_predicts_further_tokens_is_not_read(tmp_path: Path) -> None:
    """Published files of GLM-4.5 Air have one behind the last of 46 layers, which transformers ignores."""
    folder = written(tmp_path / "it", "glm4_moe")
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    last, further = f"model.layers.{config['num_hidden_layers'] - 1}.", "model.layers.46."
    more = {name.replace(last, further): one.clone() for name, one in tensors.items() if last in name}
    assert any(".experts." in name for name in more)
    save_file(tensors | more, file, {"format": "pt"})

    node = load_decoder(folder, "llm", leaves_weights=True)

    assert node.left_floats
    assert not [name for name in node.left_floats if further in name]
    node.fill()


def test_a_head_that_is_the_embeddings_too_is_read(tmp_path: Path) -> None:
    """Stored as the head only: ids are looked up in it."""
    _, folder = quantised(tmp_path, GPTQ, gptq())
    tensors, told = load_file(folder / "model.safetensors"), folder / "config.json"
    parts, floats = gptq()(tensors.pop("model.embed_tokens.weight"))
    tensors.pop("lm_head.weight", None)
    save_file(
        tensors | {f"lm_head.{end}": part for end, part in parts.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    told.write_text(json.dumps(json.loads(told.read_text()) | {"tie_word_embeddings": True}))

    node = load_decoder(folder, "llm", leaves_weights=True)

    assert "lm_head" not in node.stored_weights
    assert torch.allclose(node.model.model.embed_tokens.weight, floats.to(node.dtype))


@pytest.mark.slow
def test_a_router_in_few_bits_is_read(tmp_path: Path) -> None:
    _, folder = quantised(tmp_path, GPTQ, gptq(), "mixtral")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".gate.weight")]:
        parts, _ = gptq()(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    node = load_decoder(folder, "llm", leaves_weights=True)

    assert not any("gate" in name and "experts" not in name for name in node.stored_weights)
    assert all(layer.mlp.gate.weight.any() for layer in node.model.model.layers)


def test_a_member_of_a_group_leaves_nothing(tmp_path: Path) -> None:
    _, folder = quantised(tmp_path, GPTQ, gptq())

    assert load_decoder(folder, "llm", peers=Circle(2).members()[1], leaves_weights=True).is_filled


def test_what_is_not_stored_so_is_read(tmp_path: Path) -> None:
    plain, _ = quantised(tmp_path, GPTQ, gptq())

    assert load_decoder(plain, "llm", leaves_weights=True).is_filled


class _Slice:
    def __init__(self, *shape: int) -> None:
        self._shape = list(shape)

    def get_shape(self) -> list[int]:
        return self._shape


SHAPES = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
LAYER = "model.layers.1.mlp.experts"


def _experts(count: int = 5) -> dict[str, _Slice]:
    return {
        f"{LAYER}.{number}.{name}.weight": _Slice(*shape)
        for number in range(count)
        for name, shape in SHAPES.items()
    }


def _modules(slices: Mapping[str, Any]) -> list[str]:
    return [name.removesuffix(".weight") for name in slices]


def test_experts_of_a_layer_become_two_tensors() -> None:
    slices, other = _experts(), _Slice(3)

    found = with_placeholders({**slices, "norm.weight": other}, _modules(slices), torch.bfloat16)

    assert found.pop("norm.weight") is other
    assert {name: one[...].shape for name, one in found.items()} == {
        f"{LAYER}.gate_up_proj": (5, 12, 8),
        f"{LAYER}.down_proj": (5, 8, 6),
    }
    assert {one[...].dtype for one in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {f"{LAYER}.3.up_proj.weight": _Slice(6, 9)},
            r"up matrix of expert 3 is \(6, 9\), expected \(6, 8\)",
        ),
        ({f"{LAYER}.2.down_proj.weight": None}, r"down matrix of expert 2 is missing"),
        ({f"{LAYER}.9.up_proj.weight": _Slice(6, 8)}, r"gate matrix of expert 5 is missing"),
        ({f"{LAYER}.0.up_proj.weight": None}, r"gate matrix of expert 0 is \(6, 8\), expected \(0, 0\)"),
    ],
)
def test_experts_that_do_not_fit_each_other_are_told(change: dict[str, _Slice | None], why: str) -> None:
    slices = {name: one for name, one in (_experts() | change).items() if one is not None}

    with pytest.raises(CheckpointError, match=why):
        with_placeholders(slices, _modules(slices), torch.bfloat16)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are left in the files as they are for a GPU, although the device is a CPU."""
    monkeypatch.setattr(loader, "_has_gpu_kernels", lambda _: True)


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_all_that_is_quantised_is_left(tmp_path: Path) -> None:
    folder = written(tmp_path / "it", "qwen3")
    expected = load_decoder(folder, "llm").model.state_dict()

    node = load_decoder(folder, "llm", leaves_weights=True)

    assert not node.stored_weights
    for name, parameter in node.model.named_parameters():
        is_left = "_proj" in name or name == "lm_head.weight"
        assert (parameter.untyped_storage().nbytes() == 4) == is_left, name
        assert (name.removesuffix(".weight") in node.left_floats) == is_left, name
    node.fill()
    for name, tensor in node.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("config", "store", "bits"),
    [
        (AWQ, awq, 4),
        ({"quant_method": "fbgemm_fp8"}, float8_by_rows, 8),
        (compressed("int-quantized", symmetric=False), int8_with_zeros, 8),
    ],
)
def test_on_a_gpu_numbers_are_left_and_can_be_read_as_floats(
    tmp_path: Path, config: Mapping[str, Any], store: Callable[[torch.Tensor], Stored], bits: int
) -> None:
    _, folder = quantised(tmp_path, config, store)
    expected = load_decoder(folder, "llm").model.state_dict()

    node = load_decoder(folder, "llm", leaves_weights=True)

    assert node.left_floats.keys() == node.stored_weights.keys()
    assert len(node.stored_weights) == 14
    for name, read in node.stored_weights.items():
        weight = read()
        assert (weight.bits, weight.is_float) == (bits, store is float8_by_rows)
        assert torch.allclose(weight.floats(), expected[f"{name}.weight"], rtol=1e-6, atol=1e-6)
        assert torch.equal(node.left_floats[name](), weight.floats())


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_nothing_is_left_of_classes_that_its_kernels_do_not_know(tmp_path: Path) -> None:
    node = load_decoder(written(tmp_path / "it", "qwen3_moe"), "llm", leaves_weights=True)

    assert node.is_filled
    assert not node.left_floats


def test_floats_of_eight_bits_are_not_left_for_the_kernels_of_cpus(tmp_path: Path) -> None:
    _, folder = quantised(tmp_path, {"quant_method": "fbgemm_fp8"}, float8_by_rows)

    assert load_decoder(folder, "llm", leaves_weights=True).is_filled


def test_placeholders_are_on_the_device_of_the_model() -> None:
    slices = {"lm_head.weight": _Slice(8, 4)}

    [found] = with_placeholders(slices, ["lm_head"], torch.bfloat16, torch.device("meta")).values()

    assert found[...].device.type == "meta"
    assert found[...].stride() == (0, 0)


def test_a_gpus_memory_is_not_taken_for_floats_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would allocate it at once, and the allocator would keep it."""
    taken: list[object] = []
    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", lambda *of: taken.append(of))
    _, folder = quantised(tmp_path, AWQ, awq)

    load_decoder(folder, "llm", leaves_weights=True)
    assert not taken
    load_decoder(folder, "llm")
    assert len(taken) == 1


@pytest.mark.usefixtures("on_gpu")
def test_scales_that_are_powers_of_two_are_read(tmp_path: Path) -> None:
    def by_rows(weight: torch.Tensor) -> Stored:
        scale = torch.full((len(weight), 1), 0.5).to(torch.float8_e8m0fnu)
        stored = (weight / 0.5).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scale}, stored.float() * 0.5

    plain, folder = quantised(tmp_path, {"quant_method": "fbgemm_fp8"}, by_rows)
    expected = load_decoder(plain, "llm").model.state_dict()

    node = load_decoder(folder, "llm", leaves_weights=True)

    for name, read in node.stored_weights.items():
        assert torch.equal(read().floats(), expected[f"{name}.weight"]), name


def test_the_gpus_kernels_know_the_bodies_of_all_classes_whose_weights_are_left_for_them() -> None:
    for name in CLASSES_ON_GPU:
        assert _KINDS[name.replace("ForCausalLM", "Model")].is_on_gpu
    bodies = {body for body, kind in _KINDS.items() if kind.is_on_gpu}
    assert {
        f"{body.removesuffix('Model')}ForCausalLM" for body in bodies if "VL" not in body
    } == CLASSES_ON_GPU


@pytest.mark.parametrize(
    ("config", "store"), [(AWQ, awq), (GPTQ | {"desc_act": True}, gptq(is_ordered=False))]
)
def test_weights_that_are_read_as_floats_are_in_order_in_memory(
    tmp_path: Path, config: Mapping[str, Any], store: Callable[[torch.Tensor], Stored]
) -> None:
    """Kernels for one row read them without strides."""
    _, folder = quantised(tmp_path, config, store)

    assert all(parameter.is_contiguous() for parameter in load_decoder(folder, "llm").model.parameters())
