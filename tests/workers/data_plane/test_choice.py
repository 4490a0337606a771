"""Which ways are taken, and in which order they are tried."""

import pytest

from workers.data_plane.store import open_store
from workers.data_plane.transports.choice import Network, chosen

EVERYWHERE = Network()


async def names_of(*names: str, network: Network = EVERYWHERE) -> list[str]:
    store = open_store(total_bytes=1 << 20, transports=chosen(names, network))
    try:
        return list(store.cards)
    finally:
        await store.close()


async def test_the_cheapest_is_tried_first_in_whatever_order_they_are_asked_for() -> None:
    assert await names_of("tcp", "shm", "local") == ["local", "shm", "tcp"]


async def test_what_is_not_asked_for_is_not_there() -> None:
    assert await names_of("tcp") == ["tcp"]


def test_an_unknown_one_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no such transport: ucx; there are local, .*tcp"):
        chosen(["local", "ucx"], EVERYWHERE)


async def test_the_ranks_of_one_machine_listen_side_by_side() -> None:
    assert Network.of_rank(2, "127.0.0.1", 9000).port == 9002
    assert Network.of_rank(2, "127.0.0.1", 0).port == 0


async def test_an_address_of_another_machine_is_told_at_the_start() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        await names_of("tcp", network=Network("192.0.2.1"))
