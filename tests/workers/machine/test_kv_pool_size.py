from pathlib import Path
from typing import Any

import pytest

from configs.deployment import ConfigError
from workers.machine.kv_pool_size import PoolSize, pool_size
from workers.machine.memory import available_bytes

GIB = 2**30


def size(**changed: Any) -> PoolSize:
    given: dict[str, Any] = {
        "configured_tokens": None,
        "free_bytes": 16 * GIB,
        "bytes_per_token": 1024,
        "block_size": 16,
        "max_sequences": 64,
        "max_seq_len": 1024,
        "on_gpu": False,
    }
    return pool_size(**given | changed)


def test_a_cpu_gets_what_all_rows_can_use() -> None:
    assert size().tokens == 64 * 1024


def test_rows_of_a_long_context_are_not_all_taken_to_be_full() -> None:
    assert size(max_seq_len=32_768).tokens == 64 * 4096
    assert size(max_seq_len=2**18).tokens == 4 * 2**18  # but four of the longest fit


def test_a_cpu_keeps_three_quarters_of_its_memory() -> None:
    found = size(free_bytes=64 * 1024 * 1024)

    assert found.tokens == 16 * 1024
    assert "25% of 0.06 GiB" in found.reason


def test_a_gpu_gives_what_is_free_but_for_the_activations() -> None:
    assert size(on_gpu=True, free_bytes=10 * 1024 * 1024).tokens == 8704  # 85 %
    assert size(on_gpu=True).tokens == 64 * 1024  # never more than rows can use


@pytest.mark.parametrize("on_gpu", [True, False])
def test_ranks_that_share_a_device_take_equal_shares(on_gpu: bool) -> None:
    scarce = {"on_gpu": on_gpu, "free_bytes": 60 * 1024 * 1024}
    whole = size(**scarce)

    third = size(**scarce, sharers=3)

    assert whole.tokens // 3 - 16 <= third.tokens <= whole.tokens // 3
    assert "one of 3 shares of " in third.reason
    assert size(**scarce, sharers=3, configured_tokens=40_000).tokens == 40_000


def test_a_configured_size_is_taken_in_whole_blocks() -> None:
    found = size(configured_tokens=100)

    assert (found.tokens, found.blocks) == (112, 7)
    assert "as configured" in found.reason


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"configured_tokens": 2**30}, "at most 16777216 tokens fit"),
        ({"free_bytes": 1000}, "too little for a KV pool"),
    ],
)
def test_what_does_not_fit_is_said(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(**changed)


def test_available_memory_is_the_least_of_what_the_system_and_its_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_bytes(meminfo, tmp_path) == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 5000 * 1024
    assert available_bytes(tmp_path / "none", tmp_path / "none") > 0
