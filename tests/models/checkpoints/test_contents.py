"""The files of a checkpoint folder that decide what a model answers."""

import json
from pathlib import Path

import pytest

from models.checkpoints.contents import all_weights, processing_files, safetensors, within


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "README.md",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model-1.safetensors",
        "model-2.safetensors",
        "notes.txt",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer.model",
        "unrelated.safetensors",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_processing_reads_small_files(folder: Path) -> None:
    assert sorted(processing_files(folder)) == [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
    ]


def test_weights_are_those_of_the_index_or_a_single_file(folder: Path) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    assert sorted(safetensors(folder)) == [*shards, "model.safetensors.index.json"]
    (folder / "model.safetensors").touch()
    assert sorted(safetensors(folder)) == ["model.safetensors"]


def test_a_damaged_index_is_left_to_the_loader(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[")
    assert safetensors(folder) == {}


def test_a_loader_that_names_no_files_may_read_all(folder: Path) -> None:
    assert sorted(all_weights(folder)) == [
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "unrelated.safetensors",
    ]


def test_a_further_folder_is_named_by_its_role(folder: Path) -> None:
    assert within("snac", {"config.json": folder / "config.json"}) == {
        "snac/config.json": folder / "config.json"
    }
