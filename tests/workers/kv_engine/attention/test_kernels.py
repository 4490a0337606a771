import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import pytest
import torch

from configs.deployment import ConfigError
from models.base import KVLayout
from workers.kv_engine.attention import kernels
from workers.kv_engine.attention.kernels import choose_attention, default_kernel


def node_on(device: str, *needs: str) -> Any:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=64, needs=frozenset(needs))
    return SimpleNamespace(name="llm", device=torch.device(device), layout=layout)


@pytest.fixture(autouse=True)
def _asked_for_the_first_time() -> Iterator[None]:
    default_kernel.cache_clear()
    yield
    default_kernel.cache_clear()


def test_on_a_cpu_torch_alone_attends() -> None:
    assert default_kernel("cpu") is None


@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_on_a_gpu_it_is_the_triton_kernel_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: Literal["auto", "triton"]
) -> None:
    module = pytest.importorskip("workers.kv_engine.attention.triton", reason="Triton is made for Linux only")
    monkeypatch.setattr(kernels, "_missing_for_triton", lambda: "")

    with caplog.at_level(logging.INFO):
        assert choose_attention(node_on("cuda"), wanted) is module.attend

    assert [record.message for record in caplog.records] == [
        "llm: attention by the Triton kernel over the paged pool"
    ]


def test_a_model_whose_form_of_attention_the_kernel_lacks_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("workers.kv_engine.attention.triton", reason="Triton is made for Linux only")
    monkeypatch.setattr(kernels, "_missing_for_triton", lambda: "")

    assert choose_attention(node_on("cuda", "sinks", "cells"), "auto") is None
    assert "this model needs cells, sinks, which the kernel" in caplog.text
    with pytest.raises(ConfigError, match="triton needs a model without cells, sinks"):
        choose_attention(node_on("cuda", "sinks", "cells"), "triton")


def test_where_triton_is_not_it_is_refused_to_who_names_it_and_others_have_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_missing_for_triton", lambda: "this or that (pip install it)")

    assert choose_attention(node_on("cuda"), "auto") is None
    with pytest.raises(ConfigError, match=r"triton needs this or that \(pip install it\); auto uses"):
        choose_attention(node_on("cuda"), "triton")


def test_on_a_cpu_torch_attends_and_a_kernel_for_gpus_is_refused() -> None:
    assert choose_attention(node_on("cpu"), "auto") is None
    with pytest.raises(ConfigError, match="triton needs a GPU, and llm is on the CPU"):
        choose_attention(node_on("cpu"), "triton")


def test_headers_where_triton_looks_for_them_are_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    (tmp_path / "Python.h").touch()

    def get_path(name: str, scheme: str = "posix_local") -> str:  # as Debian's own Python has it
        return str(tmp_path) if scheme == "posix_prefix" else "/nowhere"

    monkeypatch.setattr(f"{kernels.__name__}.sysconfig.get_path", get_path)
    monkeypatch.setattr(f"{kernels.__name__}.which", lambda name: f"/usr/bin/{name}")

    assert kernels._missing_for_triton() == ""


_NOTHING: Final = {"sysconfig.get_path": "/nowhere"}


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("find_spec", "pip install triton"),
        ("which", "apt install gcc"),
        ("sysconfig.get_path", "apt install python3-dev"),
    ],
    ids=["Triton", "a C compiler", "Python's headers"],
)
def test_without_what_the_kernel_needs_torch_attends_and_the_log_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str, advice: str
) -> None:
    if missing != "find_spec":
        pytest.importorskip("triton", reason="Triton is made for Linux only")
    monkeypatch.setattr(f"{kernels.__name__}.{missing}", lambda *_: _NOTHING.get(missing))

    assert default_kernel("cuda") is None

    assert advice in caplog.text
