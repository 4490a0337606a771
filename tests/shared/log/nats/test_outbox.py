"""The outbox with simulated acks, refusals and time, without a server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.log.nats.outbox import RESEND_AFTER_S, Outbox, OutboxEntry, PublishRefused
from shared.log.port import LogFullError, LogUnavailableError, OutboxFullError

_FULL = 10077


class _Wire:
    """The transmitted events, and an event loop clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self._ahead_s = 0.0
        loop = asyncio.get_running_loop()
        real_time = loop.time
        monkeypatch.setattr(loop, "time", lambda: real_time() + self._ahead_s)

    def transmit(self, number: int, _entry: OutboxEntry) -> None:
        self.sent.append(number)

    def take(self) -> list[int]:
        sent, self.sent = self.sent, []
        return sent

    async def pass_s(self, seconds: float) -> None:
        """Advance the time in steps, and run due timers."""
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
    assert 2 < len(probes) < 15
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
    assert isinstance(failure, PublishRefused)
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


async def test_those_who_drain_at_different_times_each_wait_for_what_was_posted_before(
    outbox: Outbox,
) -> None:
    order: list[str] = []

    async def drain(name: str) -> None:
        await outbox.drain()
        order.append(name)

    numbers: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        for name in "ab":
            numbers += [outbox.post("s", b"x"), outbox.post("s", b"x")]
            tasks.create_task(drain(name))
            tasks.create_task(drain(f"{name} too"))
            await asyncio.sleep(0)
        last = outbox.post("s", b"x")
        for number, expected in zip(
            [numbers[3], numbers[1], numbers[0], last, numbers[2]],
            ([], [], ["a", "a too"], ["a", "a too"], ["a", "a too", "b", "b too"]),
            strict=True,
        ):
            outbox.acked(number, 1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert order == expected
    assert len(outbox._drains) == outbox._awaited == 0


async def test_thousands_who_wait_behind_a_full_backlog_cost_one_list(outbox: Outbox) -> None:
    numbers = [outbox.post("s", b"x") for _ in range(5)]
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4096):
            tasks.create_task(outbox.drain())
        await asyncio.sleep(0)
        assert len(outbox._drains) == 1
        for number in numbers:
            outbox.acked(number, 1)


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


# ---- what is known of the log meanwhile -------------------------------------------------------------
async def test_a_log_that_acks_nothing_for_some_seconds_has_stalled(wire: _Wire, outbox: Outbox) -> None:
    number = outbox.post("s", b"x")
    stalled = [outbox.is_stalled]
    await wire.pass_s(4)
    stalled.append(outbox.is_stalled)
    outbox.acked(number, 1)
    stalled.append(outbox.is_stalled)
    await wire.pass_s(10)  # without a post
    assert [*stalled, outbox.is_stalled] == [False, True, False, False]


async def test_one_that_acks_others_has_not(wire: _Wire, outbox: Outbox) -> None:
    outbox.post("s", b"lost on its way")
    for _ in range(5):
        await wire.pass_s(2)
        outbox.acked(outbox.post("s", b"x"), 1)
    assert not outbox.is_stalled


async def test_one_that_is_away_or_refuses_has_not(wire: _Wire, outbox: Outbox) -> None:
    number = outbox.post("s", b"x")
    outbox.offline()
    await wire.pass_s(10)
    away = outbox.is_stalled
    outbox.online()
    outbox.refused(number, _FULL, "maximum bytes exceeded")
    await wire.pass_s(10)
    assert [away, outbox.is_stalled] == [False, False]


async def test_who_gives_up_waiting_does_not_make_it_forgotten_at_once(wire: _Wire, outbox: Outbox) -> None:
    number = outbox.post("s", b"x")
    await wire.pass_s(4)
    outbox.discard(number)
    stalled = [outbox.is_stalled]
    await wire.pass_s(3)
    assert [*stalled, outbox.is_stalled] == [True, False]


async def test_a_refusal_is_believed_while_somebody_waits_and_some_seconds_longer(
    wire: _Wire, outbox: Outbox
) -> None:
    number = outbox.post("s", b"x")
    outbox.refused(number, _FULL, "maximum bytes exceeded")
    await wire.pass_s(60)
    known = [outbox.refusal]
    outbox.acked(number, 1)
    known.append(outbox.refusal)
    impatient = outbox.post("s", b"x", None, lambda _: None, waits=False)
    outbox.refused(impatient, _FULL, "maximum bytes exceeded")
    known.append(outbox.refusal)
    await wire.pass_s(3)
    assert [*known, outbox.refusal] == [_FULL, None, _FULL, None]


async def test_who_does_not_wait_for_room_is_given_back_unless_a_copy_may_be_stored(
    wire: _Wire, outbox: Outbox
) -> None:
    failures: list[Exception] = []
    first = outbox.post("s", b"x", None, failures.append, waits=False)
    outbox.refused(first, _FULL, "maximum bytes exceeded")
    assert [type(one) for one in failures] == [PublishRefused]
    assert len(outbox) == 0
    again = outbox.post("s", b"x", None, failures.append, waits=False)
    outbox.online()  # it is sent a second time
    outbox.refused(again, _FULL, "maximum bytes exceeded")
    assert len(failures) == len(outbox) == 1
    with pytest.raises(LogFullError):
        outbox.post("s", b"x", None, failures.append, waits=False)
    assert outbox.post("s", b"patient") > again
