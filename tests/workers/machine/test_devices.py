"""The device of a rank."""

import pytest
import torch

from configs.deployment import ConfigError, DeploymentConfig, NodeGroup
from workers.machine.devices import choose_device


def config(device: str) -> DeploymentConfig:
    return DeploymentConfig(
        model="decoder_lm",
        checkpoint="/nowhere",
        max_seq_len=64,
        node_groups=[NodeGroup(node_names=["llm"], ranks=[0])],
        devices={0: device},
    )


@pytest.mark.parametrize(("has_metal", "device"), [(True, "mps"), (True, "cpu"), (False, "cpu")])
def test_a_rank_computes_on_the_named_device(
    monkeypatch: pytest.MonkeyPatch, has_metal: bool, device: str
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_metal)

    assert choose_device(config(device), 0) == torch.device(device)


@pytest.mark.parametrize(
    ("device", "why"), [("mps", "torch has no Metal on this machine"), ("cuda:7", "this machine has 0 GPUs")]
)
def test_a_device_that_the_machine_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, why: str
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError, match=rf"devices.0 is '{device}', but .*{why}"):
        choose_device(config(device), 0)
