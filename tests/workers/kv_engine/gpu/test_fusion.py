"""The choice between the fused GPU kernels and transformers' modules."""

import pytest
import torch

from models.decoder_lm.nodes import load
from tests.tiny import tiny_checkpoint
from workers.kv_engine.gpu import fusion

gpu_decoder = pytest.importorskip("workers.kv_engine.gpu.decoder", reason="Triton is made for Linux only")


def test_a_node_is_fused_where_its_device_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    node = load(tiny_checkpoint("qwen3"))
    assert fusion.use_gpu_kernels(node) is node

    monkeypatch.setattr(fusion, "default_kernel", lambda _: torch.add)

    assert isinstance(fusion.use_gpu_kernels(node), gpu_decoder.FusedDecoder)
