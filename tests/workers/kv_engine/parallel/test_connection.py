import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from tests.workers.kv_engine.shared_node import lines
from workers.kv_engine.parallel import connection as connection_module
from workers.kv_engine.parallel.connection import MAX_MESSAGE_BYTES, Connection, GroupLostError

pytestmark = pytest.mark.processes


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with lines() as both:
        yield both


def test_messages_arrive_whole_and_in_order(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    large = bytes(range(256)) * 40_000
    with ThreadPoolExecutor(1) as pool:
        sending = [pool.submit(one.send, data) for data in (b"a", b"", large)]

        assert [bytes(other.receive()) for _ in range(3)] == [b"a", b"", large]
        for one_by_one in sending:
            one_by_one.result()
    assert not other.has_ended()


@pytest.mark.parametrize("closed", [0, 1])
def test_who_waits_is_told_when_either_end_is_closed(
    ends: tuple[Connection, Connection], closed: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends[1].receive)
        ends[closed].close()

        with pytest.raises(GroupLostError, match=r"the leader is gone \("):
            waiting.result()


def test_a_loop_that_looks_at_a_line_too_changes_nothing_for_who_waits_at_it(
    ends: tuple[Connection, Connection],
) -> None:
    one, other = ends
    os.set_blocking(other.fileno(), False)  # as uvloop does with all that it looks at
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.receive)
        assert not other.has_ended()
        one.send(b"a step")

        assert waiting.result() == b"a step"


def test_who_has_nothing_to_say_for_long_is_waited_for_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_IO_TIMEOUT_S", 0.001)
    with lines() as (one, other), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.receive)
        assert wait([waiting], timeout=0.02).not_done, "it gave up"
        one.send(b"a step")

        assert waiting.result() == b"a step"


def test_that_the_other_end_is_gone_is_seen_without_waiting(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    one.close()

    assert other.has_ended()
    other.close()
    with pytest.raises(GroupLostError, match="the leader is gone"):
        other.send(b"x")


def test_looking_at_a_line_waits_for_nothing_although_another_thread_reads_what_came() -> None:
    """Incoming data wakes both the loop, which checks, and the thread that reads; the order varies."""
    with lines() as (one, other), ThreadPoolExecutor(1) as pool:
        for number in range(300):
            waiting = pool.submit(other.receive)
            one.send(b"")
            while not waiting.done():
                assert not other.has_ended(), number
            waiting.result()


def test_who_announces_too_much_is_no_member() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2]) as stranger,
    ):
        connection, _ = server.accept()
        stranger.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
        end = Connection(connection, "a stranger")

        with pytest.raises(
            GroupLostError, match=f"announces {MAX_MESSAGE_BYTES + 1} bytes: expected at most"
        ):
            end.receive()
        end.close()
