"""An outbox told of acks, refusals and a clock; no server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.log.outbox import RESEND_AFTER_S, Entry, Outbox, Refused
from shared.log.port import LogUnavailableError, OutboxFullError

_FULL = 10077


class _Wire:
    """What was transmitted, and an event loop's clock that moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self._ahead_s = 0.0
        loop = asyncio.get_running_loop()
        real_time = loop.time
        monkeypatch.setattr(loop, "time", lambda: real_time() + self._ahead_s)

    def transmit(self, number: int, _entry: Entry) -> None:
        self.sent.append(number)

    def take(self) -> list[int]:
        sent, self.sent = self.sent, []
        return sent

    async def pass_s(self, seconds: float) -> None:
        """Let time pass in steps, and timers with it."""
        for _ in range(round(seconds / 0.1)):
            self._ahead_s += 0.1
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.fixture
async def wire(monkeypatch: pytest.MonkeyPatch) -> _Wire:
    return _Wire(monkeypatch)


@pytest.fixture
async def outbox(wire: _Wire) -> AsyncIterator[Outbox]:
    outbox = Outbox(wire.transmit, max_entries=5, max_bytes=1_000)
    outbox.online()
    yield outbox
    outbox.fail(LogUnavailableError("the test is over"))


async def test_a_post_is_sent_once_and_forgotten_when_acked(wire: _Wire, outbox: Outbox) -> None:
    stored: list[int] = []
    number = outbox.post("s", b"x", stored.append)
    outbox.acked(number, 42)
    outbox.acked(number, 43)  # a second copy's
    assert stored == [42]
    await wire.pass_s(10)
    assert wire.take() == [number]
    assert len(outbox) == 0


async def test_a_late_ack_has_it_sent_again_at_growing_intervals(wire: _Wire, outbox: Outbox) -> None:
    number = outbox.post("s", b"x")
    assert wire.take() == [number]
    await wire.pass_s(RESEND_AFTER_S - 0.2)
    assert wire.take() == []
    await wire.pass_s(0.8)
    assert wire.take() == [number]
    await wire.pass_s(2 * RESEND_AFTER_S - 0.8)
    assert wire.take() == []
    await wire.pass_s(1.5)
    assert wire.take() == [number]


async def test_while_offline_everything_is_kept_and_then_sent_in_order(wire: _Wire, outbox: Outbox) -> None:
    first = outbox.post("s", b"x")
    outbox.offline()
    second = outbox.post("s", b"x")
    await wire.pass_s(10)
    assert wire.take() == [first]
    outbox.online()
    assert wire.take() == [first, second]


async def test_a_refusal_stops_the_flow_until_one_entry_gets_through(wire: _Wire, outbox: Outbox) -> None:
    first, second, third = (outbox.post("s", b"x") for _ in range(3))
    assert wire.take() == [first, second, third]
    for number in (first, second, third):
        outbox.refused(number, _FULL, "maximum bytes exceeded")
    fourth = outbox.post("s", b"x")
    assert wire.take() == []
    await wire.pass_s(5)
    probes = wire.take()
    assert set(probes) == {first}
    assert 2 < len(probes) < 10
    outbox.acked(first, 1)
    assert wire.take() == [second, third, fourth]


async def test_the_ack_of_what_was_under_way_does_not_open_the_flow(wire: _Wire, outbox: Outbox) -> None:
    first, second, _ = (outbox.post("s", b"x") for _ in range(3))
    outbox.refused(first, _FULL, "maximum bytes exceeded")
    wire.take()
    outbox.acked(second, 1)
    assert wire.take() == []


async def test_a_refusal_is_logged_once(
    wire: _Wire, outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    number = outbox.post("s", b"x")
    for _ in range(5):
        outbox.refused(number, _FULL, "maximum bytes exceeded")
        await wire.pass_s(3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "maximum bytes exceeded" in caplog.text


async def test_a_failed_condition_is_told_with_how_often_it_was_sent(wire: _Wire, outbox: Outbox) -> None:
    failures: list[Exception] = []
    number = outbox.post("s", b"x", None, failures.append, expected=3)
    outbox.online()
    outbox.refused(number, 10071, "wrong last sequence")
    (failure,) = failures
    assert isinstance(failure, Refused)
    assert (failure.code, failure.sent) == (10071, 2)
    assert len(outbox) == 0


async def test_a_conditional_entry_that_fails_while_probed_lets_the_next_be_probed(
    wire: _Wire, outbox: Outbox
) -> None:
    failures: list[Exception] = []
    first = outbox.post("s", b"x", None, failures.append, expected=3)
    second = outbox.post("s", b"x")
    outbox.refused(first, _FULL, "maximum bytes exceeded")
    wire.take()
    await wire.pass_s(0.5)
    assert set(wire.take()) == {first}
    outbox.refused(first, 10071, "wrong last sequence")
    await wire.pass_s(3)
    assert set(wire.take()) == {second}


async def test_the_bounds_are_in_events_and_in_bytes(outbox: Outbox) -> None:
    numbers = [outbox.post("s", b"x") for _ in range(5)]
    with pytest.raises(OutboxFullError, match="5 events"):
        outbox.post("s", b"x")
    for number in numbers:
        outbox.acked(number, number)
    outbox.post("s", bytes(999))
    with pytest.raises(OutboxFullError, match="999 bytes"):
        outbox.post("s", b"xx")


async def test_drain_waits_for_what_was_posted_before_it(outbox: Outbox) -> None:
    first, second = outbox.post("s", b"x"), outbox.post("s", b"x")
    draining = asyncio.ensure_future(outbox.drain())
    await asyncio.sleep(0)
    third = outbox.post("s", b"x")
    outbox.acked(third, 3)
    outbox.acked(second, 2)
    await asyncio.sleep(0)
    assert not draining.done()
    outbox.acked(first, 1)
    await draining


async def test_a_failure_is_told_to_all_who_wait_and_to_all_who_come(outbox: Outbox) -> None:
    failures: list[Exception] = []
    outbox.post("s", b"x", None, failures.append)
    draining = asyncio.ensure_future(outbox.drain())
    await asyncio.sleep(0)
    failure = LogUnavailableError("gone")
    outbox.fail(failure)
    assert failures == [failure]
    with pytest.raises(LogUnavailableError, match="gone"):
        await draining
    with pytest.raises(LogUnavailableError, match="gone"):
        outbox.post("s", b"x")
