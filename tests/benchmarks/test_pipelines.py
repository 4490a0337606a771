"""`python -m benchmarks pipelines`: calls join in a forward, failures are named, tiles save memory."""

from pathlib import Path

import pytest
import torch

from benchmarks import pipelines_gpu
from benchmarks.pipelines import memory
from benchmarks.random_pipeline import write_random_pipeline

SMALL_QWEN = {
    "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6),
    "joint_attention_dim": 32,
}  # fmt: skip


def test_a_forward_over_two_calls_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines_gpu, "STEPS", 1)
    module, arguments = pipelines_gpu.qwen_image("cpu", **SMALL_QWEN)
    assert pipelines_gpu.call_s(module, arguments, 2, "cpu") > 0
    assert module.dtype is torch.bfloat16


def test_a_model_that_fails_is_named_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(device: str) -> None:
        raise RuntimeError(f"no memory on {device}")

    monkeypatch.setattr(pipelines_gpu, "qwen_image", fails)
    monkeypatch.setattr(pipelines_gpu, "wan22", fails)
    assert pipelines_gpu.one_by_one("cpu") == []
    printed = capsys.readouterr().out
    assert printed.count("no memory on cpu") == 2
    assert "Qwen-Image" in printed
    assert "Wan2.2" in printed


def test_decoding_in_tiles_takes_less_memory(tmp_path: Path) -> None:
    whole, tiled = memory(write_random_pipeline(tmp_path, width=128, layers=1), side=1024)
    assert 0 < tiled.value < whole.value
