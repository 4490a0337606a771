import pytest

from shared.log.nats.connection import NatsConnection
from shared.log.nats.servers import servers_in


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("nats://a:4223", ["nats://a:4223"]),
        ("a", ["nats://a:4222"]),
        ("nats://a:1,nats://b:2,nats://c:3", ["nats://a:1", "nats://b:2", "nats://c:3"]),
        ("tls://a, b:2 ,[::1]:3", ["tls://a:4222", "nats://b:2", "nats://[::1]:3"]),
    ],
)
def test_an_address_names_one_server_or_several(text: str, addresses: list[str]) -> None:
    assert [server.address for server in servers_in(text)] == addresses


async def test_servers_that_a_cluster_no_longer_has_are_forgotten_but_none_that_was_named() -> None:
    connection = NatsConnection("nats://a:1")
    connection.options["dont_randomize"] = True
    connection._setup_server_pool(connection._urls)
    connection._current_server = connection._server_pool[0]

    async def pool_after(*told: str) -> list[str]:
        await connection._process_info({"connect_urls": list(told)})
        return sorted(one.uri.netloc for one in connection._server_pool)

    assert await pool_after("b:2", "c:3") == ["a:1", "b:2", "c:3"]
    assert await pool_after("c:3", "d:4") == ["a:1", "c:3", "d:4"]
    assert await pool_after() == ["a:1", "c:3", "d:4"]  # a server that is alone tells of none


async def test_all_of_them_are_named_and_no_secret_is() -> None:
    connection = NatsConnection("nats://user:sesame@a:1,nats://b:2")
    assert connection.label == "NATS at a:1 or b:2"
    assert connection.address == "nats://a:1,nats://b:2"
    assert sorted(connection._urls) == ["nats://b:2", "nats://user:sesame@a:1"]
