"""Companion models of a node: their memory counts, and what excludes token programs is refused at load."""

from typing import Any

import pytest

from configs.checks import resolve
from configs.deployment import ConfigError, DeploymentConfig
from models.checkpoints.progress import silent
from models.transformers_lm.loader import load_decoder
from tests.tiny import tiny_checkpoint
from tests.tiny.infilling.nodes import InfillLM
from workers.kv_engine.node import KVNode
from workers.loading import engines, node_loading
from workers.loading.engines import make_kv_engines
from workers.machine import kv_pool_size
from workers.machine.kv_pool_size import PoolSize
from workers.settings import EngineSettings


@pytest.fixture
def config() -> DeploymentConfig:
    return resolve(str(tiny_checkpoint("qwen3")))


@pytest.fixture
def _infilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of the configuration has a token program and a tower: the same model again."""
    checkpoint = tiny_checkpoint("qwen3")

    def load(*_: object, **__: object) -> KVNode:
        return InfillLM(load_decoder(checkpoint, "llm"), load_decoder(checkpoint, "llm"))

    monkeypatch.setattr(node_loading, "load_kv_node", load)


@pytest.mark.usefixtures("_infilling")
def test_the_pool_counts_the_keys_and_values_of_towers(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized: list[int] = []

    def pool_size(*, bytes_per_token: int, **others: Any) -> PoolSize:
        sized.append(bytes_per_token)
        return kv_pool_size.pool_size(bytes_per_token=bytes_per_token, **others)

    monkeypatch.setattr(engines, "pool_size", pool_size)

    [engine] = make_kv_engines(config, EngineSettings(), 0, silent).values()

    layout = engine.node.layout
    own = 2 * layout.layers * layout.kv_heads * layout.head_dim * engine.node.dtype.itemsize
    assert sized == [2 * own], "the judge is the same model once more"


@pytest.mark.usefixtures("_infilling")
def test_speculation_is_refused_for_a_node_with_token_programs(config: DeploymentConfig) -> None:
    with pytest.raises(ConfigError, match=r"speculative_tokens is 3.*leave it out"):
        make_kv_engines(config, EngineSettings(speculative_tokens=3), 0, silent)
