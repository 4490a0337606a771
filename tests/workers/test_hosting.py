from typing import Any

import msgspec
import pytest
import torch

from shared.config import ConfigError, resolve
from tests.tiny import tiny_checkpoint
from workers.hosting import choose_device, make_engine
from workers.settings import EngineSettings


def no_progress(done: int, total: int, name: str) -> None:
    """Nobody is told."""


def test_each_rank_gets_a_gpu_of_its_own_as_far_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert [str(choose_device("auto", rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(choose_device("cuda", 1)) == "cuda:0"
    assert str(choose_device("cpu", 1)) == "cpu"
    with pytest.raises(ConfigError, match="'cuda:2', but this machine has 2 GPUs"):
        choose_device("cuda:2", 0)


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert str(choose_device("auto", 0)) == "cpu"
    with pytest.raises(ConfigError, match="has 0 GPUs"):
        choose_device("cuda", 0)


@pytest.mark.parametrize(
    ("changed", "tokens"), [({"kv_tokens": 40}, 48), ({}, 4 * 512), ({"max_seq_len": 100}, 4 * 100)]
)
def test_the_pool_is_as_large_as_configured_or_as_rows_can_use(
    changed: dict[str, Any], tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = msgspec.structs.replace(resolve(str(tiny_checkpoint("qwen3"))), **changed)
    engine = make_engine(config, EngineSettings(device="cpu", max_rows=4), 0, no_progress)

    assert engine.stats().kv_total == tokens
    assert ("longer requests are refused" in caplog.text) == (tokens < config.max_seq_len)


def test_progress_is_told_while_weights_load() -> None:
    told: list[tuple[int, int]] = []
    make_engine(
        resolve(str(tiny_checkpoint("qwen3"))),
        EngineSettings(device="cpu"),
        0,
        lambda done, total, name: told.append((done, total)),
    )

    assert len(told) > 5
    assert max(done for done, _ in told) == told[0][1]
