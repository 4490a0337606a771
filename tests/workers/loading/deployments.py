"""Deployments of tiny checkpoints for the tests of `workers.loading`."""

from typing import Any

import pytest
import torch

from configs.deployment import DeploymentConfig, NodeGroup
from tests.tiny.orpheus import tiny_orpheus


def no_progress(done: int, total: int, name: str) -> None:
    """Ignore the progress of loading."""


def orpheus(*groups: tuple[list[str], list[int]], **changes: Any) -> DeploymentConfig:
    """Return a deployment with these nodes on ranks, for all walks, and other values changed."""
    node_groups = [NodeGroup(node_names=nodes, ranks=ranks) for nodes, ranks in groups]
    values: dict[str, Any] = {"model_kwargs": {"device": "cpu"}, "node_groups": node_groups}
    return DeploymentConfig(
        model="orpheus", checkpoint=str(tiny_orpheus()), max_seq_len=64, **(values | changes)
    )


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    tiny_orpheus()  # made first: its random weights would look for those GPUs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
