"""Loading of nodes, and the checks before it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from configs.checks import resolve
from configs.deployment import ConfigError, NodeGroup
from models import registry
from tests.peers import Circle
from tests.tiny import tiny_checkpoint
from tests.tiny.orpheus import tiny_orpheus
from tests.workers.kv_engine.shared_node import lines
from tests.workers.loading.deployments import no_progress, orpheus
from workers.kv_engine.parallel import collectives
from workers.kv_engine.parallel.rendezvous import Rendezvous
from workers.loading import device_share, node_loading
from workers.loading.engines import make_follower_engine, make_kv_engines
from workers.machine import memory
from workers.settings import EngineSettings
from workers.tensor_parallel.group import GroupMembership


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    settings = EngineSettings(speculative_tokens=4, draft_model=str(tiny_orpheus()))
    with pytest.raises(ConfigError, match="expected one with the same tokenizer"):
        make_kv_engines(resolve(str(tiny_checkpoint("qwen3"))), settings, 0, no_progress)


def test_progress_is_told_while_weights_load() -> None:
    told: list[tuple[int, int, str]] = []
    make_kv_engines(
        resolve(str(tiny_checkpoint("qwen3"))),
        EngineSettings(),
        0,
        lambda done, total, name: told.append((done, total, name)),
    )

    assert len(told) > 5
    assert max(done for done, *_ in told) == told[0][1]
    assert {name for *_, name in told} == {"llm"}


@pytest.mark.slow
def test_what_loading_makes_for_a_moment_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    @contextmanager
    def given_back() -> Iterator[None]:
        given.append("from here")
        yield
        given.append("to here")

    monkeypatch.setattr(memory, "given_back", given_back)
    told = msgspec.structs.replace(
        EngineSettings(), speculative_tokens=2, draft_model=resolve("demo").checkpoint
    )
    make_kv_engines(
        resolve("demo"), told, 0, lambda done, total, _: given.append("read") if done == total else None
    )

    assert given == ["from here", "read", "read", "to here"]  # the model, and the one that guesses for it


@pytest.mark.processes
def test_a_family_that_does_not_know_how_to_share_its_node_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Families of other packages may have been written before there was sharing."""

    def load(checkpoint: Any, node: str, *, device: Any, dtype: str, progress: Any, kwargs: Any) -> None:
        pytest.fail("it would load all of it")

    monkeypatch.setattr(registry, "module", lambda family, name: SimpleNamespace(load=load))
    monkeypatch.setattr(collectives, "TorchPeers", lambda meeting, device: Circle(2).members()[1])
    groups = [NodeGroup(node_names=["LLM", "snac_decoder"], ranks=[0, 1], tp_size=2)]
    rendezvous = Rendezvous(index=1, size=2, address="127.0.0.1", port=1, own_address="127.0.0.1", key="k")
    config = orpheus(node_groups=groups)

    with (
        lines() as (_, line),
        pytest.raises(
            ConfigError, match="orpheus does not know how to share 'LLM' among 2 ranks; leave tp_size out"
        ),
    ):
        make_follower_engine(config, EngineSettings(), 1, no_progress, GroupMembership(rendezvous, [line]))
    with pytest.raises(ConfigError, match="does not know how to share 'LLM' among 2 ranks"):
        node_loading.check_kv_nodes(config)


def test_texts_longer_than_the_models_are_refused_also_where_its_config_says_no_length(
    tmp_path: Path,
) -> None:
    """The model's class has a length then, and configurations are read by those who do not know classes."""
    folder = tmp_path / "silent"
    copytree(tiny_checkpoint("llama"), folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(raw))
    config = msgspec.structs.replace(resolve("demo"), checkpoint=str(folder), max_seq_len=2048)

    assert node_loading.check_kv_nodes(config)

    with pytest.raises(ConfigError, match=r"max_seq_len is 2049, but the model in .* was made for 2048"):
        node_loading.check_kv_nodes(msgspec.structs.replace(config, max_seq_len=2049))


def test_a_model_without_a_kv_node_has_none_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_share, "nodes_of", lambda config, rank, kind: [])

    assert not node_loading.check_kv_nodes(orpheus((["LLM", "snac_decoder"], [0])))
