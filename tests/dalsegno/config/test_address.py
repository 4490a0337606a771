import socket
from contextlib import suppress

import pytest

from dalsegno.config import address
from dalsegno.config.address import AddressError, Listen


@pytest.mark.processes
def test_port_zero_becomes_a_port_that_is_free() -> None:
    [listen] = address.free("127.0.0.1", 0)
    with socket.socket() as sock:
        sock.bind((listen.host, listen.port))


@pytest.mark.processes
def test_several_are_at_ports_that_the_system_picks_or_that_follow() -> None:
    picked = [listen.port for listen in address.free("127.0.0.1", 0, 4)]
    assert len(set(picked)) == 4
    for first in range(20_000, 30_000, 3):
        with suppress(AddressError):  # somebody listens there
            following = address.free("127.0.0.1", first, 3)
            break
    assert [listen.port for listen in following] == [first, first + 1, first + 2]


def test_there_are_no_ports_behind_the_last() -> None:
    with pytest.raises(AddressError, match="the last port is 65535"):
        address.free("127.0.0.1", 65_534, 3)


@pytest.mark.processes
def test_of_several_none_may_be_taken() -> None:
    for first in range(20_000, 30_000, 3):  # below the ports that the system gives to other tests
        with suppress(AddressError):
            address.free("127.0.0.1", first, 2)
            break
    with (
        socket.create_server(("127.0.0.1", first + 1)),
        pytest.raises(AddressError, match=f"port {first + 1}"),
    ):
        address.free("127.0.0.1", first, 2)


@pytest.mark.processes
def test_a_port_somebody_listens_on_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=rf"port {port}: Address already in use.*--port"):
            address.free("127.0.0.1", port)


@pytest.mark.processes
def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1"):
        address.free("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_url_is_one_by_which_this_machine_reaches_it(host: str, url: str) -> None:
    assert Listen(host=host, port=80).url == url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("nats://10.0.0.1:4223", "nats://10.0.0.1:4223"),
        ("nats://nats", "nats://nats:4222"),
        ("nats:4222", "nats://nats:4222"),
        ("tls://[::1]:4222/", "tls://[::1]:4222"),
        ("nats://a:1,nats://b:2, c", "nats://a:1,nats://b:2,nats://c:4222"),
    ],
)
def test_a_nats_address_is_written_out(text: str, url: str) -> None:
    assert address.nats_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "http://host:4222",
        "nats://",
        "nats://host:port",
        "nats://host/x",
        "",
        "nats://a,",
        "nats://a nats://b",
    ],
)
def test_what_is_no_nats_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="is not the address of a NATS server"):
        address.nats_url(text)


def test_a_secret_in_an_argument_is_refused_and_not_repeated() -> None:
    with pytest.raises(AddressError, match="DALSEGNO_NATS_TOKEN") as caught:
        address.nats_url("nats://host:4222,nats://sesame@host:4223")
    assert "sesame" not in caught.value.message
