"""The two halves of a checkpoint: what each holds, under old names and new ones, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.llava.nodes import examine, load
from models.vision_language.decoder import VlmDecoder, load_decoder
from models.vision_language.tower import VisionEncoder
from tests.peers import Circle, together
from tests.tiny.vision import VisionFamily, tiny_vision_checkpoint, write_vision_checkpoint

IDS = torch.arange(5, 40)
_NEW = {
    "language_model.lm_head": "lm_head",
    "language_model.model": "model.language_model",
    "vision_tower": "model.vision_tower",
    "multi_modal_projector": "model.multi_modal_projector",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("llava"), "llava")


def language(folder: Path) -> VlmDecoder:
    found = load(folder, "llm")
    assert isinstance(found, VlmDecoder)
    return found


def tower(folder: Path) -> VisionEncoder:
    found = load(folder, "vision_encoder")
    assert isinstance(found, VisionEncoder)
    return found


def copied(checkpoint: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with other weights."""
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_each_half_holds_its_own_parameters_only(checkpoint: Path) -> None:
    whole = load_file(checkpoint / "model.safetensors")
    llm, seeing = language(checkpoint), tower(checkpoint)

    assert llm.parameters + sum(one.numel() for one in seeing.model.parameters()) == sum(
        one.numel() for one in whole.values()
    )
    assert llm.model.model.vision_tower is None
    assert seeing.model.model.language_model is None
    assert seeing.model.lm_head is None


def test_weights_are_found_under_old_names_and_new_ones(checkpoint: Path, tmp_path: Path) -> None:
    whole = load_file(checkpoint / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in whole)
    renamed = {}
    for name, tensor in whole.items():
        old = next(old for old in _NEW if name.startswith(old))
        renamed[_NEW[old] + name.removeprefix(old)] = tensor
    again = copied(checkpoint, tmp_path, renamed)

    torch.testing.assert_close(language(again).reference(IDS), language(checkpoint).reference(IDS))
    for one, other in zip(tower(again).model.parameters(), tower(checkpoint).model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("kept", "node"), [("language_model", "llm"), ("vision", "vision_encoder")])
def test_a_half_reads_no_tensor_of_the_other(checkpoint: Path, tmp_path: Path, kept: str, node: str) -> None:
    whole = load_file(checkpoint / "model.safetensors")
    is_of_language = {name: name.startswith("language_model") for name in whole}
    half = {name: one for name, one in whole.items() if is_of_language[name] == (kept == "language_model")}
    folder = copied(checkpoint, tmp_path, half)
    read: list[str] = []

    load(folder, node, progress=lambda _done, _total, name: read.append(name))

    assert sorted(read) == sorted(half)


@pytest.mark.parametrize(
    ("lost", "node"),
    [("language_model.model.norm.weight", "llm"), ("multi_modal_projector.linear_1.bias", "vision_encoder")],
)
def test_a_missing_tensor_is_named(checkpoint: Path, tmp_path: Path, lost: str, node: str) -> None:
    whole = load_file(checkpoint / "model.safetensors")
    del whole[lost]

    with pytest.raises(CheckpointError, match=r"lack LlavaForConditionalGeneration: 1 tensors"):
        load(copied(checkpoint, tmp_path, whole), node)


def test_a_class_that_transformers_does_not_have_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["MindReaderForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedArchitectureError, match="MindReaderForConditionalGeneration"):
        examine(tmp_path, "llm")


def test_the_longest_sequence_is_that_of_the_language_model(checkpoint: Path) -> None:
    assert examine(checkpoint, "llm") == language(checkpoint).max_positions == 2048
    assert examine(checkpoint, "llm", members=2) == 2048


def test_values_of_the_nested_configs_that_name_an_implementation_are_ignored(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"] |= {"_attn_implementation": "flash_attention_2", "torch_dtype": "bfloat16"}
    folder = copied(checkpoint, tmp_path, load_file(checkpoint / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))

    torch.testing.assert_close(language(folder).reference(IDS), language(checkpoint).reference(IDS))


@pytest.mark.parametrize("family", ["idefics3", "internvl", "llava", "mistral3"])
def test_members_of_a_group_come_to_what_the_whole_language_model_comes_to(family: VisionFamily) -> None:
    folder = tiny_vision_checkpoint(family)
    whole = load_decoder(folder, "llm")
    parts = [load_decoder(folder, "llm", peers=member) for member in Circle(2).members()]

    def logits(node: VlmDecoder) -> torch.Tensor:
        with torch.inference_mode():
            return node.reference(IDS)

    found = together([partial(logits, part) for part in parts])

    assert torch.allclose(found[0], logits(whole), atol=1e-4 * float(logits(whole).std()))
    assert torch.equal(found[0], found[1])
    assert parts[0].layout.kv_heads == 1
    assert parts[0].parameters < whole.parameters
