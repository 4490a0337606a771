"""The simulated log misbehaves as configured, and a connection to it copes with that."""

import random

import pytest

from shared.events import EpochOpened, RequestCancel, encode
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor.script import SUBJECTS
from tests.simulation.line import Line, RegressedError
from tests.simulation.log import SimLog
from tests.simulation.reading import Reader


def log_of(count: int) -> SimLog:
    log = SimLog(lambda: 1_000_000_000)
    for number in range(count):
        log.append(SUBJECTS.control(f"r{number % 3}"), encode(RequestCancel(id=str(number))))
    return log


def line_to(log: SimLog, seed: int = 0) -> Line:
    return Line(log, random.Random(seed), Reader(log, lambda _: True, 0))


def read_all(line: Line, p_lost: float = 0.0) -> list[int]:
    seqs: list[int] = []
    for _ in range(2_000):
        assert line.is_online
        if line.reader.has_records:
            seqs.append(line.reader.take().seq)
        elif line.reader.has_deliveries:
            line.reader.deliver(line.chance, p_lost)
        elif line.reader.is_behind:
            line.reader.beat()
        else:
            break
    return seqs


@pytest.mark.parametrize("seed", range(10))
def test_each_record_is_read_once_in_order_whatever_is_lost_or_doubled_on_the_way(seed: int) -> None:
    line = line_to(log_of(60), seed)

    assert read_all(line, p_lost=0.3) == list(range(1, 61))


def test_what_was_delivered_before_a_restart_is_not_read_again() -> None:
    log = log_of(20)
    line = line_to(log)
    line.reader.deliver(line.chance, 0.0)
    first = line.reader.take().seq
    log.is_up = False
    assert not line.is_online
    log.is_up = True

    assert [first, *read_all(line)] == list(range(1, 21))


def test_who_has_read_past_where_the_log_went_back_has_to_stop_however_long_it_is_now() -> None:
    log = log_of(10)
    ahead, behind = line_to(log), line_to(log)
    assert read_all(ahead)[-1] == 10

    log.go_back(5, is_new=False)
    for _ in range(20):
        log.append(SUBJECTS.control("r9"), encode(RequestCancel(id="new")))

    with pytest.raises(RegressedError):
        _ = ahead.is_online
    assert read_all(behind) == list(range(1, 26))


def test_of_a_log_made_anew_everybody_stops() -> None:
    log = SimLog(lambda: 0)
    line = line_to(log)
    log.go_back(0, is_new=True)

    with pytest.raises(RegressedError):
        _ = line.is_online


def test_what_gets_no_ack_is_sent_again_and_stored_behind_later_events() -> None:
    log = SimLog(lambda: 0)
    line = line_to(log, seed=5)
    for number in range(3):
        line.post(SUBJECTS.control("r1"), RequestCancel(id=str(number)))
    line.transmit(0.0, 1.0)
    while line.outbox:
        line.transmit(0.0, 0.0)

    ids = [event.id for event in log.events if event is not None]
    assert ids[0] == "0"
    assert sorted(set(ids)) == ["0", "1", "2"]
    assert ids.count("0") == 2


def test_a_claim_is_stored_only_once_and_its_lost_ack_is_found_out() -> None:
    log = SimLog(lambda: 0)
    line = line_to(log)
    heard: list[int] = []
    claim = EpochOpened(id="epoch.1", writer=CONDUCTOR_WRITER, epoch=1, conductor="c", core="k")
    line.publish(SUBJECTS.epoch, claim, 0, heard.append, lambda: heard.append(-1))
    line.transmit(0.0, 1.0)
    line.transmit(0.0, 0.0)

    assert heard == [1]
    assert log.last_seq == 1


def test_a_full_log_takes_nothing() -> None:
    log = SimLog(lambda: 0)
    line = line_to(log)
    line.post(SUBJECTS.control("r1"), RequestCancel(id="0"))
    log.is_full = True

    assert line.transmit(0.0, 0.0) == "refused: the log is full"
    assert log.last_seq == 0
    assert line.outbox
