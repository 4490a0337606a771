"""Tensors from GPU to GPU through stores that are opened as a worker opens them, with a pretended driver.

The pretended GPU memory is the machine's own, so torch's tensors on the CPU stand for tensors on the GPU.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from configs.deployment import DataPlaneSettings, DeploymentConfig, NodeGroup
from shared.tensors import Handle
from tests.tiny.orpheus import tiny_orpheus
from tests.workers.data_plane.cuda import Gpus, PretendedCuda
from workers.data_plane import assembly
from workers.data_plane.arrays import publish, to_array, to_tensor
from workers.data_plane.port import DeviceArray
from workers.data_plane.step_tensors import LostTensor, StepTensors
from workers.data_plane.store import ArenaStore
from workers.data_plane.transport import DEVICE_SEGMENT, Locator
from workers.loading import tensor_store
from workers.loading.tensor_store import open_tensors
from workers.orders.inbox import StepKey

pytestmark = pytest.mark.processes


CPU = torch.device("cpu")
GPU_ARENA = 1 << 16


def config(**plane: Any) -> DeploymentConfig:
    """Two ranks, each with a GPU, and one that computes nothing."""
    groups = [
        NodeGroup(node_names=["prepare"], ranks=[2]),
        NodeGroup(node_names=["LLM"], ranks=[0]),
        NodeGroup(node_names=["snac_decoder"], ranks=[1]),
    ]
    settings = DataPlaneSettings(arena_bytes=1 << 22, **plane)
    return DeploymentConfig(
        model="orpheus",
        checkpoint=str(tiny_orpheus()),
        node_groups=groups,
        max_seq_len=64,
        data_plane=settings,
    )


def use_gpus(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> list[PretendedCuda]:
    """Let each rank that is opened find a driver of its own; returns the drivers."""
    drivers: list[PretendedCuda] = []

    def find() -> PretendedCuda:
        drivers.append(PretendedCuda(gpus))
        return drivers[-1]

    monkeypatch.setattr(tensor_store, "find_driver", find)
    monkeypatch.setattr(assembly, "find_driver", find)
    monkeypatch.setattr(tensor_store, "GPU_ARENA_BYTES", GPU_ARENA)
    return drivers


@asynccontextmanager
async def opened(deployment: DeploymentConfig) -> AsyncIterator[list[ArenaStore]]:
    """The stores of all ranks, each with the endpoints of the others."""
    stores = [open_tensors(deployment, rank) for rank in deployment.ranks]
    for rank, store in enumerate(stores):
        store.begin_incarnation(rank, 10 + rank)
        for other, theirs in enumerate(stores):
            if other != rank:
                store.add_peer(other, 10 + other, theirs.endpoints)
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


def step(store: ArenaStore, rank: int) -> StepTensors:
    return StepTensors(store, StepKey("r", 1, 1), rank)


def published(tensors: StepTensors, tensor: torch.Tensor, readers: list[int]) -> Handle | None:
    """As the stateless engine does with an output that other ranks read."""
    publisher = tensors.publisher("r/1/1/out", readers)
    return publish(publisher, tensor) if publisher is not None else None


async def test_a_tensor_goes_from_gpu_to_gpu_and_not_through_main_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drivers = use_gpus(monkeypatch, Gpus())
    tensor = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    async with opened(config()) as (owner, reader, _):
        handle = published(step(owner, 0), tensor, [1])
        assert handle is not None
        assert msgspec.msgpack.decode(handle.locator or b"", type=Locator).segment == DEVICE_SEGMENT
        reading = step(reader, 1)
        found = await reading.for_engine(handle)
        assert isinstance(found, DeviceArray)

        assert to_tensor(found, CPU).equal(tensor)
        reading.check([handle])
        assert reader.stats().fetched_bytes == 0
        assert any(entry[0] == "wait" for driver in drivers for entry in driver.log)


async def test_who_wants_bytes_gets_them_also_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, Gpus())
    tensor = torch.arange(1024, dtype=torch.float32)
    async with opened(config()) as (owner, reader, _):
        handle = published(step(owner, 0), tensor, [1])
        assert handle is not None
        for store, rank in ((owner, 0), (reader, 1)):
            assert to_tensor(await step(store, rank).read(handle), CPU).equal(tensor)


async def test_a_tensor_that_is_freed_is_gone_for_engines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, Gpus())
    async with opened(config()) as (owner, reader, _):
        making = step(owner, 0)
        handle = published(making, torch.ones(1024), [1])
        assert handle is not None
        reading = step(reader, 1)
        found = await reading.for_engine(handle)
        assert isinstance(found, DeviceArray)
        making.close()

        with pytest.raises(LostTensor, match="was freed"):
            to_tensor(found, CPU)
        with pytest.raises(LostTensor, match="was freed"):
            reading.check([handle])
        again = published(step(owner, 0), torch.ones(1024), [1])
        assert again is None or again.locator != handle.locator


async def test_a_tensor_that_outlives_its_step_is_kept_in_main_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_gpus(monkeypatch, Gpus())
    async with opened(config()) as (owner, _, far):
        making = step(owner, 0)
        handle = published(making, torch.ones(1024), [1])
        assert handle is not None
        kept = await making.keep(making.note_put(handle))
        making.close()

        assert to_tensor(await step(far, 2).read(kept), CPU).equal(torch.ones(1024))


@pytest.mark.parametrize(
    ("prepare", "readers", "nbytes", "reason"),
    [
        (lambda gpus: None, [1, 2], 4096, "rank 2 is not reached by cuda_ipc"),
        (lambda gpus: None, [1], 2 * GPU_ARENA, "the GPU's arena is full"),
        (lambda gpus: setattr(gpus, "is_ipc_refused", True), [1], 4096, "rank 1 is not reached by cuda_ipc"),
    ],
    ids=["a reader without a GPU", "full", "CUDA refuses"],
)
async def test_main_memory_is_used_where_the_gpus_is_not_and_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prepare: Callable[[Gpus], None],
    readers: list[int],
    nbytes: int,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    gpus = Gpus()
    use_gpus(monkeypatch, gpus)
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    async with opened(config()) as (owner, reader, _):
        prepare(gpus)
        making = step(owner, 0)
        assert published(making, tensor, readers) is None
        assert f"published in main memory: {reason}" in caplog.text
        handle = await making.put("r/1/1/out", to_array(tensor))

        assert to_tensor(await step(reader, 1).read(handle), CPU).equal(tensor)


async def test_small_tensors_are_inline_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, Gpus())
    async with opened(config()) as (owner, *_):
        assert published(step(owner, 0), torch.ones(4), [1]) is None


# ---- which ranks have it -----------------------------------------------------------------------------------


async def transports_of(deployment: DeploymentConfig) -> list[list[str]]:
    async with opened(deployment) as stores:
        return [list(store.endpoints) for store in stores]


async def test_only_ranks_that_compute_on_a_gpu_offer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, Gpus())

    assert await transports_of(config()) == [
        ["local", "cuda_ipc", "shm", "tcp"],
        ["local", "cuda_ipc", "shm", "tcp"],
        ["local", "shm", "tcp"],
    ]
    on_cpu = msgspec.structs.replace(config(), devices={0: "cpu", 1: "cpu"})
    assert await transports_of(on_cpu) == [["local", "shm", "tcp"]] * 3
    assert await transports_of(config(transports=["tcp"])) == [["tcp"]] * 3, "as configured"


async def test_without_cuda_the_transports_are_those_of_a_cpu_and_only_a_named_one_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for module in (tensor_store, assembly):
        monkeypatch.setattr(module, "find_driver", lambda: None)

    assert await transports_of(config()) == [["local", "shm", "tcp"]] * 3
    assert "cuda_ipc" not in caplog.text
    assert await transports_of(config(transports=["cuda_ipc", "tcp"])) == [["tcp"]] * 3
    assert "no cuda_ipc: this worker keeps no tensors on a GPU" in caplog.text


async def test_a_gpu_without_handles_for_other_processes_leaves_the_other_transports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = Gpus()
    gpus.is_ipc_refused = True
    use_gpus(monkeypatch, gpus)

    assert await transports_of(config()) == [["local", "shm", "tcp"]] * 3
    assert "no cuda_ipc: GPU 0 gives no handles for other processes" in caplog.text
