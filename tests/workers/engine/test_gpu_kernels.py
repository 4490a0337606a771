import logging
from collections.abc import Iterator
from typing import Final

import pytest
import torch

from shared.models.decoder_lm.nodes import load
from tests.tiny import tiny_checkpoint
from workers.engine import gpu_kernels
from workers.engine.gpu_kernels import by_gpu_kernels, kernel_for


@pytest.fixture(autouse=True)
def _asked_for_the_first_time() -> Iterator[None]:
    kernel_for.cache_clear()
    yield
    kernel_for.cache_clear()


def test_on_a_cpu_torch_alone_attends() -> None:
    assert kernel_for("cpu") is None


def test_on_a_gpu_it_is_the_triton_kernel_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = pytest.importorskip("workers.engine.triton_attention", reason="Triton is made for Linux only")
    monkeypatch.setattr(gpu_kernels, "_missing", lambda: "")

    with caplog.at_level(logging.INFO):
        assert [kernel_for("cuda") for _ in range(3)] == [module.attend] * 3

    assert [record.message for record in caplog.records] == [
        "attention on GPUs: Triton kernel over the paged pool"
    ]


_NOTHING: Final = {"sysconfig.get_paths": {"include": "/nowhere"}}


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("find_spec", "pip install triton"),
        ("which", "apt install gcc"),
        ("sysconfig.get_paths", "apt install python3-dev"),
    ],
    ids=["Triton", "a C compiler", "Python's headers"],
)
def test_without_what_the_kernel_needs_torch_attends_and_the_log_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str, advice: str
) -> None:
    if missing != "find_spec":
        pytest.importorskip("triton", reason="Triton is made for Linux only")
    monkeypatch.setattr(f"{gpu_kernels.__name__}.{missing}", lambda *_: _NOTHING.get(missing))

    assert kernel_for("cuda") is None

    assert advice in caplog.text


def test_a_node_is_computed_by_our_kernels_where_one_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_decoder = pytest.importorskip("workers.engine.gpu_decoder", reason="Triton is made for Linux only")
    node = load(tiny_checkpoint("qwen3"))
    assert by_gpu_kernels(node) is node

    monkeypatch.setattr(gpu_kernels, "kernel_for", lambda _: torch.add)

    assert isinstance(by_gpu_kernels(node), gpu_decoder.FusedDecoder)
