import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, Literal

import pytest
import torch

from configs.deployment import ConfigError
from models.decoder_lm.nodes import load
from tests.tiny import tiny_checkpoint
from workers.kv_engine.attention import kernels
from workers.kv_engine.attention.kernels import attention_of, by_gpu_kernels, kernel_for


def node_on(device: str) -> Any:
    return SimpleNamespace(name="llm", device=torch.device(device))


@pytest.fixture(autouse=True)
def _asked_for_the_first_time() -> Iterator[None]:
    kernel_for.cache_clear()
    yield
    kernel_for.cache_clear()


def test_on_a_cpu_torch_alone_attends() -> None:
    assert kernel_for("cpu") is None


@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_on_a_gpu_it_is_the_triton_kernel_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: Literal["auto", "triton"]
) -> None:
    module = pytest.importorskip("workers.kv_engine.attention.triton", reason="Triton is made for Linux only")
    monkeypatch.setattr(kernels, "_missing", lambda: "")

    with caplog.at_level(logging.INFO):
        assert attention_of(node_on("cuda"), wanted) is module.attend

    assert [record.message for record in caplog.records] == [
        "llm: attention by the Triton kernel over the paged pool"
    ]


def test_where_triton_is_not_it_is_refused_to_who_names_it_and_others_have_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_missing", lambda: "this or that (pip install it)")

    assert attention_of(node_on("cuda"), "auto") is None
    with pytest.raises(ConfigError, match=r"triton needs this or that \(pip install it\); auto is"):
        attention_of(node_on("cuda"), "triton")


def test_on_a_cpu_torch_attends_and_a_kernel_for_gpus_is_refused() -> None:
    assert attention_of(node_on("cpu"), "auto") is None
    with pytest.raises(ConfigError, match="triton needs a GPU, and llm is on the CPU"):
        attention_of(node_on("cpu"), "triton")


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
    monkeypatch.setattr(f"{kernels.__name__}.{missing}", lambda *_: _NOTHING.get(missing))

    assert kernel_for("cuda") is None

    assert advice in caplog.text


def test_a_node_is_computed_by_our_kernels_where_one_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_decoder = pytest.importorskip("workers.kv_engine.gpu.decoder", reason="Triton is made for Linux only")
    node = load(tiny_checkpoint("qwen3"))
    assert by_gpu_kernels(node) is node

    monkeypatch.setattr(kernels, "kernel_for", lambda _: torch.add)

    assert isinstance(by_gpu_kernels(node), gpu_decoder.FusedDecoder)
