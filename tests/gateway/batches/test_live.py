"""Heartbeats of running batches."""

import msgspec

from gateway.batches.live import SILENT_S, BatchBeat, LiveBatches


def beat(owner: str = "g-1", completed: int = 3) -> bytes:
    return msgspec.msgpack.encode(BatchBeat(owner=owner, completed=completed, failed=0))


def test_a_batch_is_silent_some_seconds_after_its_last_heartbeat() -> None:
    live = LiveBatches()

    assert not live.is_silent("b", "g-1", 100.0)
    live.receive("b", beat(), 104.0)
    assert not live.is_silent("b", "g-1", 104.0 + SILENT_S)
    assert live.is_silent("b", "g-1", 104.1 + SILENT_S)


def test_a_batch_that_was_never_heard_is_silent_some_seconds_after_it_is_known() -> None:
    live = LiveBatches()

    assert not live.is_silent("b", "g-1", 100.0)
    assert live.is_silent("b", "g-1", 100.1 + SILENT_S)


def test_a_new_owner_has_its_own_time() -> None:
    live = LiveBatches()
    live.receive("b", beat("g-1"), 100.0)

    assert not live.is_silent("b", "g-2", 200.0)
    assert not live.is_silent("b", "g-2", 200.0 + SILENT_S)
    assert live.is_silent("b", "g-2", 200.1 + SILENT_S)


def test_so_has_one_that_claims_a_batch_of_which_nothing_was_heard() -> None:
    live = LiveBatches()
    live.is_silent("b", "g-1", 100.0)

    assert live.is_silent("b", "g-1", 200.0)
    assert not live.is_silent("b", "g-2", 200.0)


def test_a_malformed_heartbeat_is_ignored_and_an_ended_batch_forgotten() -> None:
    live = LiveBatches()
    live.receive("b", b"\xc1", 1.0)
    assert live == LiveBatches()

    live.receive("b", beat(), 1.0)
    live.forget("b")
    assert live == LiveBatches()
