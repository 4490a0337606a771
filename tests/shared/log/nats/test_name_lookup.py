import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from shared.log.nats.name_lookup import NameLookup


class NameServer:
    """Replaces the system's resolver; it answers when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.has_been_asked = threading.Event()
        self.answer = threading.Event()
        self.trouble: OSError | None = None

    def look(self, host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        self.asked.append(host)
        self.has_been_asked.set()
        assert self.answer.wait(60)
        if self.trouble is not None:
            raise self.trouble
        return [(0, 0, 0, "", (address, port)) for address in ("10.0.0.1", "10.0.0.2", "10.0.0.1")]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.look)
    yield server
    server.answer.set()


async def test_a_name_has_its_addresses_each_once(server: NameServer) -> None:
    server.answer.set()

    assert await NameLookup().addresses("nats", 4222) == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_an_address_is_not_looked_up(server: NameServer, address: str) -> None:
    assert await NameLookup().addresses(address, 4222) == [address]
    assert server.asked == []


async def test_a_name_without_addresses_is_an_error_and_looked_up_again(server: NameServer) -> None:
    names = NameLookup()
    server.trouble = socket.gaierror(-2, "Name or service not known")
    server.answer.set()

    for _ in range(2):
        with pytest.raises(OSError, match="not known"):
            await names.addresses("nowhere", 4222)
    assert server.asked == ["nowhere", "nowhere"]


async def test_all_who_ask_meanwhile_share_one_lookup(server: NameServer) -> None:
    names = NameLookup()
    given_up = asyncio.create_task(names.addresses("nats", 4222))
    await asyncio.to_thread(server.has_been_asked.wait)
    given_up.cancel()
    others = [asyncio.create_task(names.addresses("nats", 4222)) for _ in range(5)]
    await asyncio.sleep(0)

    server.answer.set()

    assert [await other for other in others] == [["10.0.0.1", "10.0.0.2"]] * 5
    assert server.asked == ["nats"]


def test_a_loop_ends_without_waiting_for_a_lookup(server: NameServer) -> None:
    async def give_up() -> None:
        lookup = asyncio.create_task(NameLookup().addresses("nats", 4222))
        await asyncio.to_thread(server.has_been_asked.wait)
        lookup.cancel()

    with asyncio.Runner() as runner:
        runner.run(give_up())

    assert not server.answer.is_set()
