"""A cursor's handling of deliveries, gaps, heartbeats and flow control, without a server."""

import asyncio

from shared.log.nats.cursor import Cursor


def _cursor(
    start_seq: int = 1, end_seq: int | None = None, max_pending: int = 100
) -> tuple[Cursor, list[str]]:
    answers: list[str] = []
    cursor = Cursor(start_seq, end_seq, answers.append, max_pending=max_pending, max_pending_bytes=1_000)
    cursor.attaching()
    cursor.attached(num_pending=9)
    return cursor, answers


def _deliver(cursor: Cursor, seq: int, delivery: int, pending: int = 1, data: bytes = b"x") -> None:
    cursor.deliver(b"ds.walk.r", b"$JS.ACK.DS_LOG.name.1.%d.%d.77.%d" % (seq, delivery, pending), data)


def _heartbeat(cursor: Cursor, delivery: int, seq: int, stalled: bytes = b"") -> None:
    header = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: %d\r\nNats-Last-Stream: %d\r\n" % (
        delivery,
        seq,
    )
    cursor.control(b"", header + (b"Nats-Consumer-Stalled: %s\r\n" % stalled if stalled else b"") + b"\r\n")


def _taken(cursor: Cursor) -> list[int]:
    seqs = []
    while (record := cursor.take()) is not None:
        seqs.append(record.seq)
    return seqs


def test_the_position_moves_with_the_delivery_not_with_the_taking() -> None:
    cursor, _ = _cursor()
    _deliver(cursor, 4, 1)
    _deliver(cursor, 9, 2)
    assert cursor.position == 9
    assert _taken(cursor) == [4, 9]


def test_a_delivery_under_a_domain_is_understood() -> None:
    cursor, _ = _cursor()
    cursor.deliver(b"ds.walk.r", b"$JS.ACK.hub.ACCHASH.DS_LOG.name.1.4.1.77.0.random", b"x")
    record = cursor.take()
    assert record is not None
    assert (record.seq, record.time_ns, record.subject, record.data) == (4, 77, "ds.walk.r", b"x")


def test_a_gap_is_a_fault_and_what_came_before_it_stays() -> None:
    cursor, _ = _cursor()
    _deliver(cursor, 4, 1)
    _deliver(cursor, 6, 3)
    _deliver(cursor, 7, 4)
    assert cursor.fault is not None
    assert cursor.position == 4
    assert _taken(cursor) == [4]


def test_a_loss_at_the_end_shows_in_the_heartbeat() -> None:
    cursor, _ = _cursor()
    _deliver(cursor, 4, 1)
    _heartbeat(cursor, 1, 4)
    assert cursor.fault is None
    _heartbeat(cursor, 2, 5)
    assert cursor.fault is not None


def test_an_overflow_is_a_fault_and_not_a_loss() -> None:
    cursor, _ = _cursor(max_pending=2)
    for number in (1, 2, 3):
        _deliver(cursor, number, number)
    assert cursor.fault is not None
    assert cursor.position == 2
    assert _taken(cursor) == [1, 2]


def test_bytes_are_bounded_too_and_come_free_when_taken() -> None:
    cursor, _ = _cursor()
    _deliver(cursor, 1, 1, data=bytes(1_000))
    assert cursor.take() is not None
    _deliver(cursor, 2, 2, data=bytes(1_000))
    assert cursor.fault is None
    _deliver(cursor, 3, 3)
    assert cursor.fault is not None


def test_flow_control_is_answered_once_what_came_before_is_taken() -> None:
    cursor, answers = _cursor()
    cursor.control(b"fc.0", b"NATS/1.0 100 FlowControl Request\r\n\r\n")
    assert answers == ["fc.0"]
    _deliver(cursor, 1, 1)
    cursor.control(b"fc.1", b"NATS/1.0 100 FlowControl Request\r\n\r\n")
    _deliver(cursor, 2, 2)
    assert cursor.take() is not None
    assert answers == ["fc.0"]
    assert _taken(cursor) == [2]
    assert answers == ["fc.0", "fc.1"]


def test_a_stalled_consumer_is_answered_again_only_when_nothing_is_left_to_take() -> None:
    cursor, answers = _cursor()
    _deliver(cursor, 1, 1)
    _heartbeat(cursor, 1, 1, stalled=b"fc.1")
    assert answers == []
    assert _taken(cursor) == [1]
    _heartbeat(cursor, 1, 1, stalled=b"fc.1")
    assert answers == ["fc.1"]


def test_two_silent_ticks_in_a_row_are_a_fault() -> None:
    cursor, _ = _cursor()
    cursor.tick()
    cursor.tick()
    _heartbeat(cursor, 0, 0)
    cursor.tick()
    cursor.tick()
    assert cursor.fault is None
    cursor.tick()
    assert cursor.fault == "no heartbeat"


def test_a_bounded_cursor_finishes_at_its_end_or_where_nothing_is_pending() -> None:
    at_end, _ = _cursor(end_seq=5)
    _deliver(at_end, 5, 1, pending=3)
    assert at_end.finished

    beyond, _ = _cursor(end_seq=5)
    _deliver(beyond, 6, 1)
    assert beyond.finished
    assert _taken(beyond) == []

    no_more, _ = _cursor(end_seq=5)
    _deliver(no_more, 2, 1, pending=0)
    assert no_more.finished
    assert _taken(no_more) == [2]


def test_a_bounded_cursor_finishes_on_a_heartbeat_past_its_end_and_no_earlier() -> None:
    cursor, _ = _cursor(end_seq=5)
    _heartbeat(cursor, 0, 4)  # a cold disk may keep it busy longer than a heartbeat
    assert not cursor.finished
    _heartbeat(cursor, 0, 5)
    assert cursor.finished


def test_a_bounded_cursor_finishes_when_nothing_matches() -> None:
    cursor = Cursor(1, 5, lambda _: None, max_pending=1, max_pending_bytes=1)
    cursor.attaching()
    cursor.attached(num_pending=0)
    assert cursor.finished
    assert Cursor(7, 6, lambda _: None, max_pending=1, max_pending_bytes=1).finished


async def test_waiting_ends_with_a_record_a_fault_or_the_end() -> None:
    for change in (
        lambda cursor: _deliver(cursor, 1, 1),
        lambda cursor: cursor.fail("anything"),
        lambda cursor: _heartbeat(cursor, 0, 5),
    ):
        cursor, _ = _cursor(end_seq=5)
        waiting = asyncio.ensure_future(cursor.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        change(cursor)
        await waiting
        await cursor.wait()  # and it does not wait again


def test_a_record_on_a_subject_that_is_no_text_is_a_record() -> None:
    cursor, _ = _cursor()
    cursor.deliver(b"ds.request.\xff", b"$JS.ACK.DS_LOG.name.1.4.1.77.1", b"x")
    record = cursor.take()
    assert record is not None
    assert (record.seq, record.subject) == (4, "ds.request.\N{REPLACEMENT CHARACTER}")


def test_what_is_delivered_beyond_the_wanted_is_dropped_and_counts_for_the_position() -> None:
    cursor, _ = _cursor()
    cursor.attaching(lambda subject: subject == b"ds.walk.r", until_seq=6)
    _deliver(cursor, 4, 1)
    cursor.deliver(b"ds.done.0.r", b"$JS.ACK.DS_LOG.name.1.5.2.77.1", b"x")
    assert (cursor.position, cursor.fault) == (5, None)
    _deliver(cursor, 6, 3)
    assert cursor.fault is not None, "from here on a consumer of the wanted alone is to be made"
    assert (cursor.position, _taken(cursor)) == (6, [4, 6])


# ---- a log that several servers keep ----------------------------------------------------------------
def _of_a_replica(end_seq: int) -> Cursor:
    cursor = Cursor(1, end_seq, lambda _: None, max_pending=9, max_pending_bytes=99, is_replicated=True)
    cursor.attaching()
    return cursor


def test_a_server_that_has_nothing_left_may_only_be_behind() -> None:
    cursor = _of_a_replica(end_seq=5)
    cursor.attached(num_pending=0)
    seemed = [(cursor.seems_finished, cursor.finished)]
    _deliver(cursor, 2, 1, pending=1)
    seemed.append((cursor.seems_finished, cursor.finished))
    _deliver(cursor, 3, 2, pending=0)
    seemed.append((cursor.seems_finished, cursor.finished))
    assert seemed == [(True, False), (False, False), (True, False)]


def test_what_a_server_that_is_behind_delivers_again_is_passed_over() -> None:
    cursor, _ = _cursor()
    for delivery, seq in enumerate((4, 5, 6), 1):
        _deliver(cursor, seq, delivery)
    cursor.fail("the connection is new")
    cursor.attaching()
    for delivery, seq in enumerate((5, 6, 7), 1):  # asked to begin at 7, it had 4 records
        _deliver(cursor, seq, delivery)
    assert (_taken(cursor), cursor.position, cursor.fault) == ([4, 5, 6, 7], 7, None)


def test_what_came_from_the_end_or_behind_it_is_the_end_whoever_delivers() -> None:
    at_end, behind, heard = (_of_a_replica(end_seq=5) for _ in range(3))
    _deliver(at_end, 5, 1, pending=0)
    _deliver(behind, 7, 1, pending=0)
    _heartbeat(heard, 0, 6)
    assert [one.finished for one in (at_end, behind, heard)] == [True, True, True]
    assert _taken(behind) == []
