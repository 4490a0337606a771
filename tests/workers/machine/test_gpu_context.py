"""After an error, a GPU that this process cannot use any more is told from one that still works."""

import pytest
import torch

from workers.machine.gpu_context import DeviceLostError, check_context

GPU = torch.device("cuda", 1)


def test_an_error_that_comes_again_is_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        assert device is GPU
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors ...")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    with pytest.raises(DeviceLostError, match=r"cuda:1 .* \(CUDA error: device-side assert triggered\): "):
        check_context(GPU)


def test_a_device_that_still_works_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)

    check_context(GPU)

    assert asked == [GPU]


def test_a_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: pytest.fail("there is no CUDA"))

    check_context(torch.device("cpu"))
