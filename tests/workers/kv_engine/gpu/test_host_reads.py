"""Operations that a CUDA graph cannot record are found before a capture begins."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.gpu.test_cuda_graphs import Refusing, engine
from tests.workers.kv_engine.pretended_streams import pretend
from workers.kv_engine.gpu.cuda_graphs import CudaCapture
from workers.kv_engine.gpu.host_reads import HostReadError, RefuseHostReads

X = torch.arange(6.0)
HERE = torch.device("cpu")
ELSEWHERE = torch.device("meta")


@pytest.mark.parametrize(
    "compute",
    [
        lambda: X.sum().item(),
        lambda: int(X[0]),
        lambda: 1 if X.sum() > 3 else 2,
        X.nonzero,
        lambda: X[X > 2],
        lambda: torch.where(X > 2),
        lambda: X.clone().index_put_((X > 2,), torch.zeros(3)),
        lambda: X.masked_select(X > 2),
        X.unique,
        X.unique_consecutive,
        lambda: torch.equal(X, X),
        lambda: X.long().bincount(),
        lambda: torch.repeat_interleave(torch.tensor([1, 2])),
        lambda: X.to(ELSEWHERE),
        lambda: torch.empty(6, device=ELSEWHERE).copy_(X),
    ],
)
def test_an_operation_that_makes_the_host_wait_is_refused(compute: Callable[[], object]) -> None:
    with pytest.raises(HostReadError), RefuseHostReads():
        compute()


@pytest.mark.parametrize(
    "compute",
    [
        lambda: X @ X,
        lambda: X.masked_fill(X > 2, 0),
        lambda: X[torch.tensor([1, 2])],
        lambda: X.to(torch.bfloat16),
        lambda: X.index_select(0, torch.tensor([0])),
        lambda: X.topk(2),
        lambda: X.scatter_add(0, torch.tensor([0]), X[:1]),
        lambda: torch.repeat_interleave(torch.tensor([1, 2]), output_size=3),
        lambda: torch.empty(6, device=ELSEWHERE).copy_(X, non_blocking=True),
        lambda: torch.multinomial(X, 2),
    ],
)
def test_any_other_operation_is_computed(compute: Callable[[], Any]) -> None:
    expected = compute()
    with RefuseHostReads():
        found = compute()
    assert type(found) is type(expected)


def test_the_message_names_the_operation_and_the_reason() -> None:
    with pytest.raises(HostReadError, match=r"aten\.index\.Tensor has a mask as index"), RefuseHostReads():
        _ = X[X > 2]


def test_a_capture_that_would_fail_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: pytest.fail("a capture was begun"))
    own = streams.current

    def compute() -> None:
        X.sum().item()

    with pytest.raises(HostReadError):
        CudaCapture(torch.device("cuda")).capture(compute)

    assert streams.current is own


def test_a_failed_capture_leaves_the_thread_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = pretend(monkeypatch)
    own, calls = streams.current, []

    def compute() -> None:
        calls.append(1)
        if len(calls) == 3:  # the first two warm it up
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture(torch.device("cuda")).capture(compute)

    assert streams.current is own


def test_the_log_has_the_first_cause_of_a_failed_recording(
    qwen3: DecoderLM, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(text: str) -> Exception:
        error = RuntimeError(text)
        error.__context__ = HostReadError("aten.nonzero reads a result on the host")
        return error

    with caplog.at_level(logging.WARNING):
        engine(qwen3, Refusing(failed, largest=0))

    assert "cannot be recorded (aten.nonzero reads a result on the host)" in caplog.text
