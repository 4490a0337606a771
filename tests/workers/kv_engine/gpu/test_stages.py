from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux only")

from triton.runtime.errors import OutOfResources

from workers.kv_engine.gpu import stages


def pool(device: str, head: int) -> Any:
    """A pool whose first layer is recurrent."""
    none, cells = (
        SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, shape=shape)
        for shape in ((512, 0, 0), (512, 8, head))
    )
    return SimpleNamespace(keys=[none, cells], values=[none, cells], is_latent=[False, False])


@pytest.mark.parametrize(("default_us", "more_us", "chosen"), [(20.0, 30.0, 3), (30.0, 20.0, 5)])
def test_the_faster_number_of_stages_is_measured_once(
    monkeypatch: pytest.MonkeyPatch, default_us: float, more_us: float, chosen: int
) -> None:
    asked: list[int] = []

    def decode_us(*_: object, stages: int) -> float:
        asked.append(stages)
        return {3: default_us, 5: more_us}[stages]

    found: dict[Any, int] = {}
    monkeypatch.setattr(stages, "decode_us", decode_us)
    monkeypatch.setattr(stages, "decode_stages", found)

    for device, head in (("cpu", 64), ("cuda:0", 128), ("cuda:0", 128)):
        stages.choose_stages(pool(device, head), 16)

    assert asked == [3, 5]
    assert found == {(torch.device("cuda:0"), torch.bfloat16, 128): chosen}


def test_a_gpu_without_memory_for_more_stages_keeps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_us(*_: object, stages: int) -> float:
        if stages > 3:
            raise OutOfResources(165_184, 101_376, "shared memory")
        return 20.0

    found: dict[Any, int] = {}
    monkeypatch.setattr(stages, "decode_us", decode_us)
    monkeypatch.setattr(stages, "decode_stages", found)

    stages.choose_stages(pool("cuda:0", 512), 16)

    assert list(found.values()) == [3]
