"""The device of a rank, and the ranks it shares the device with."""

from typing import Any

import pytest
import torch

from configs.deployment import ConfigError, NodeGroup
from models.base import EngineKind
from tests.workers.loading.deployments import gpus, orpheus
from workers.loading import device_share
from workers.machine.cores import cores
from workers.machine.devices import choose_device


def test_each_rank_gets_a_gpu_of_its_own_as_far_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    config = orpheus((["LLM"], [0, 2]), (["snac_decoder"], [1]), model_kwargs={})

    assert [str(choose_device(config, rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_what_is_said_of_a_rank_goes_before_what_is_said_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    config = orpheus(
        (["LLM"], [0, 2]),
        (["snac_decoder"], [1]),
        model_kwargs={"device": "cuda"},
        devices={1: "cpu", 2: "cuda:1"},
    )

    assert [str(choose_device(config, rank)) for rank in range(3)] == ["cuda:0", "cpu", "cuda:1"]


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)

    assert str(choose_device(orpheus((["LLM", "snac_decoder"], [0]), model_kwargs={}), 0)) == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": {0: "cuda:2"}}, "devices.0 is 'cuda:2', but this machine has 2 GPUs"),
        ({"model_kwargs": {"device": "cuda:3"}}, "model_kwargs.device is 'cuda:3', but this machine has 2"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    gpus(monkeypatch, 2)

    with pytest.raises(ConfigError, match=message):
        choose_device(orpheus((["LLM", "snac_decoder"], [0]), **changes), 0)


def test_ranks_on_one_device_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    config = orpheus(
        (["prepare"], [5]), (["LLM"], [0, 1, 2]), (["snac_decoder"], [4]), model_kwargs={}, devices={4: "cpu"}
    )

    assert (device_share.of(config, 0).other_ranks, device_share.of(config, 0).kv_pools) == ((2,), 2)
    assert (device_share.of(config, 1).other_ranks, device_share.of(config, 1).kv_pools) == ((), 1)
    assert (device_share.of(config, 4).other_ranks, device_share.of(config, 4).kv_pools) == ((), 0)
    assert str(device_share.of(config, 2)) == "cuda:0, shared with rank 0"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(device_share.of(config, 2)) == "cuda:0, shared with ranks 0, 1"


def test_ranks_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_share, "cores", lambda: 12)
    config = orpheus((["prepare"], [5]), (["LLM"], [0, 1]), (["snac_decoder"], [2]))

    assert [device_share.of(config, rank).cores for rank in range(3)] == [4, 4, 4]
    assert device_share.of(orpheus((["LLM", "snac_decoder"], [0])), 0).cores == 12
    monkeypatch.setattr(device_share, "cores", lambda: 2)
    assert device_share.of(config, 0).cores == 1


def test_the_machine_has_a_core() -> None:
    assert cores() >= 1


def test_those_who_share_a_node_on_one_machine_leave_each_other_room() -> None:
    config = orpheus(node_groups=[NodeGroup(node_names=["LLM", "snac_decoder"], ranks=[0, 1], tp_size=2)])

    assert device_share.nodes_of(config, 1, EngineKind.KV) == ["LLM"]
    assert device_share.nodes_of(config, 1, EngineKind.STATELESS) == [], "the leader has it"
    assert (device_share.of(config, 1).other_ranks, device_share.of(config, 1).kv_pools) == ((0,), 2)
    assert device_share.of(config, 1).cores == max(1, cores() // 2)
