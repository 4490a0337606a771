"""Which ways are taken, and in which order they are tried."""

import logging

import pytest

from workers.data_plane.assembly import ListenAddress, make_transports
from workers.data_plane.store import open_store
from workers.data_plane.transports import nixl

EVERYWHERE = ListenAddress()


async def names_of(*names: str, network: ListenAddress = EVERYWHERE) -> list[str]:
    store = open_store(total_bytes=1 << 20, transports=make_transports(names, network))
    try:
        return list(store.endpoints)
    finally:
        await store.close()


@pytest.mark.processes
async def test_the_cheapest_is_tried_first_in_whatever_order_they_are_asked_for() -> None:
    assert await names_of("tcp", "shm", "local") == ["local", "shm", "tcp"]


@pytest.mark.processes
async def test_what_is_not_asked_for_is_not_there() -> None:
    assert await names_of("tcp") == ["tcp"]


def test_an_unknown_one_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no such transport: ucx; there are local, .*tcp"):
        make_transports(["local", "ucx"], EVERYWHERE)


async def test_the_ranks_of_one_machine_listen_side_by_side() -> None:
    assert ListenAddress.of_rank(2, "127.0.0.1", 9000).port == 9002
    assert ListenAddress.of_rank(2, "127.0.0.1", 0).port == 0


async def test_a_worker_without_a_gpu_has_no_way_between_gpus_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    assert await names_of("cuda_ipc", "shm") == ["shm"]
    assert "no cuda_ipc: this worker keeps no tensors on a GPU" in caplog.text


async def test_nixl_that_is_not_installed_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("nixl_of_another_planet",))

    with pytest.raises(ValueError, match=r"NIXL is not installed: pip install 'dalsegno\[rdma\]'"):
        await names_of("nixl")


@pytest.mark.processes
async def test_an_address_of_another_machine_is_told_at_the_start() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        await names_of("tcp", network=ListenAddress("192.0.2.1"))
