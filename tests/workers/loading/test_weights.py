"""The digests of what a rank loads: by node, and of everything that decides an answer."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.deployment import DeploymentConfig
from models import registry
from models.checkpoints.digests import CheckpointReplacedError, DigestCache
from tests.tiny import write_checkpoint
from tests.workers.loading.deployments import orpheus
from workers import settings
from workers.generation.engine_client import EngineClient
from workers.loading.model import LocalModel
from workers.loading.weights import RankWeights, rank_digest

APART = orpheus((["prepare"], [0]), (["LLM"], [1]), (["snac_decoder"], [2]))


@pytest.fixture
def config(tmp_path: Path) -> DeploymentConfig:
    """Orpheus on one rank, in a folder of this test, with a draft model and SNAC elsewhere."""
    shared = orpheus((["prepare", "LLM", "snac_decoder"], [0]))
    shutil.copytree(shared.checkpoint, tmp_path / "served")
    shutil.move(tmp_path / "served" / "snac", tmp_path / "snac")
    draft = tmp_path / "draft"
    draft.mkdir()
    write_checkpoint(draft, "llama")
    kwargs = shared.model_kwargs | {
        "snac": str(tmp_path / "snac"),
        "draft_model": str(draft),
        "speculative_tokens": 2,
    }
    return msgspec.structs.replace(shared, checkpoint=str(tmp_path / "served"), model_kwargs=kwargs)


def digests(config: DeploymentConfig, rank: int = 0) -> dict[str, str]:
    weights = RankWeights.open(config, settings.of(config), rank, DigestCache(None))
    weights.begin()
    return weights.loaded()


def appended(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


ALL = {"prepare", "LLM", "snac_decoder"}


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("served/model-00002-of-00002.safetensors", {"LLM"}),
        ("served/model.safetensors.index.json", {"LLM"}),
        ("served/config.json", {"prepare", "LLM"}),
        ("served/tokenizer.json", {"prepare", "LLM"}),
        ("served/generation_config.json", {"prepare", "LLM"}),
        ("draft/model.safetensors", {"LLM"}),
        ("draft/config.json", {"LLM"}),
        ("snac/config.json", {"snac_decoder"}),
        ("snac/pytorch_model.bin", {"snac_decoder"}),
    ],
)
def test_each_file_belongs_to_the_nodes_that_load_it(
    file: str, changes: set[str], config: DeploymentConfig, tmp_path: Path
) -> None:
    before = digests(config)
    assert before.keys() == ALL
    appended(tmp_path / file)
    after = digests(config)
    assert {node for node in ALL if before[node] != after[node]} == changes


def test_a_chat_template_that_appears_is_a_change(config: DeploymentConfig, tmp_path: Path) -> None:
    before = digests(config)
    (tmp_path / "served" / "chat_template.jinja").write_text("{{ messages }}")
    after = digests(config)
    assert {node for node in ALL if before[node] != after[node]} == {"prepare", "LLM"}


def test_other_files_of_the_folder_do_not_matter(config: DeploymentConfig, tmp_path: Path) -> None:
    before = digests(config)
    for name in ("README.md", "optimizer.bin", "other.safetensors"):
        (tmp_path / "served" / name).write_text("read by nobody")
    assert digests(config) == before


def test_the_same_checkpoint_has_the_same_digests_in_every_folder(
    config: DeploymentConfig, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "served", tmp_path / "copy")
    moved = msgspec.structs.replace(config, checkpoint=str(tmp_path / "copy"))
    assert digests(moved) == digests(config)


def test_a_rank_digests_its_own_nodes() -> None:
    found = {rank: digests(APART, rank) for rank in (0, 1, 2)}
    assert [sorted(nodes) for nodes in found.values()] == [["prepare"], ["LLM"], ["snac_decoder"]]
    assert len({rank_digest(nodes) for nodes in found.values()}) == 3


def test_a_family_that_names_no_files_may_read_all(
    config: DeploymentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its checkpoint, and of the further folders in its own `model_kwargs`."""
    monkeypatch.setattr(registry, "weight_files", lambda family: None)
    before = digests(config)
    for file in ("served/adapter.safetensors", "snac/adapter.bin"):
        (tmp_path / file).write_text("more weights")
        after = digests(config)
        assert after["LLM"] != before["LLM"]
        assert after["snac_decoder"] != before["snac_decoder"]
        before = after


def test_a_rank_without_nodes_has_no_digest() -> None:
    assert rank_digest({}) == ""


async def test_a_load_during_which_a_file_is_replaced_fails_by_name(
    config: DeploymentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = msgspec.structs.replace(config, model_kwargs={"snac": str(tmp_path / "snac")})
    load = LocalModel._load_processing

    def replaced_then_loaded(self: LocalModel) -> Any:
        appended(tmp_path / "served" / "tokenizer_config.json")
        return load(self)

    monkeypatch.setattr(LocalModel, "_load_processing", replaced_then_loaded)
    prepare = orpheus((["prepare"], [0]), (["LLM", "snac_decoder"], [1]))
    plain = msgspec.structs.replace(plain, node_groups=prepare.node_groups)
    model = LocalModel(plain, settings.of(plain), 0)
    with pytest.raises(CheckpointReplacedError, match=r"tokenizer_config\.json was replaced"):
        await model.load(EngineClient())
    await model.close()
