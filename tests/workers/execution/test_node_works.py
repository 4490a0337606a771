"""The report of a step's nodes: the sums of their calls and of their engines' records."""

import pytest

from shared.events import MAX_NAMED, Preemption, decode, encode
from shared.events.results import NodeWork, WalkCompleted
from workers.execution.node_works import NodeWorks
from workers.threads.engine_work import Eviction


def test_calls_are_counted_and_timed() -> None:
    works = NodeWorks()
    for _ in range(2):
        with works.call("vocoder"):
            pass

    found = works.report()["vocoder"]
    assert found.calls == 2
    assert 0 <= found.took_s < 1


def test_a_call_that_still_runs_counts_up_to_now() -> None:
    works = NodeWorks()
    with works.call("vocoder"):
        record = works.record("vocoder")
        assert works.report()["vocoder"].waited_s == 0, "it was not given to the engine"
        record.queue()
        found = works.report()["vocoder"]

        assert found.took_s > 0
        assert found.waited_s > 0, "it has not begun"
        record.admit()
        assert works.report()["vocoder"].waited_s < works.report()["vocoder"].took_s


def test_ended_calls_are_added_up_without_their_records() -> None:
    works = NodeWorks()
    for rows in (1, 3):
        with works.call("vocoder"), works.record_of_call("vocoder") as record:
            record.queued_s, record.admitted_s = 1.0, 1.5
            record.count_step(rows)
    found = works.report()["vocoder"]

    assert (found.calls, found.steps, found.rows, found.waited_s) == (2, 2, 2.0, 1.0)
    assert not works._nodes["vocoder"].records


def test_drafts_are_added_up() -> None:
    works = NodeWorks()
    for drafted, accepted in ((4, 3), (2, 0)):
        record = works.record("llm")
        record.count_draft(drafted, accepted)
        record.decline_draft()
    found = works.report()["llm"]

    assert (found.drafted, found.accepted, found.undrafted_steps) == (6, 3, 2)


def test_a_request_is_not_its_own_neighbour() -> None:
    works = NodeWorks("r1")
    with works.call("llm"):
        record = works.record("llm")
        record.lacked, record.behind, record.behind_count = "places", ("r1.1.2.draft", "r2.1.1.llm"), 2
        record.beside = {"r1.1.2.draft": 9, "r2.1.1.llm": 4}
    found = works.report()["llm"]

    assert found.behind == ["r2"]
    assert found.beside == {"r2": 4}


def test_a_call_that_fails_counts() -> None:
    works = NodeWorks()
    with pytest.raises(RuntimeError), works.call("vocoder"):
        raise RuntimeError

    assert works.report()["vocoder"].calls == 1


def test_the_report_names_requests_and_not_sequences() -> None:
    works = NodeWorks()
    with works.call("llm"):
        record = works.record("llm")
        record.queued_s, record.admitted_s, record.first_token_s = 10.0, 11.5, 12.0
        record.lacked, record.behind, record.behind_count = "places", ("r8.1.1.llm", "r9.1.1.llm"), 2
        for rows in (1, 2, 3, 4):
            record.count_step(rows)
        record.cached_tokens = 32
        record.beside, record.beside_s = {"r9.1.1.llm": 512, "r9.1.1.draft": 8}, 0.25
        record.evictions = (Eviction(at_s=13.0, by="r4.1.1.llm", recomputed=412, ended_s=13.5),)
        record.eviction_count, record.evicted_s = 1, 0.5
        record.held_s = 0.125
    found = works.report()["llm"]

    assert (found.waited_s, found.first_token_s, found.held_s) == (1.5, 2.0, 0.125)
    assert (found.lacked, found.behind, found.behind_count) == ("places", ["r8", "r9"], 2)
    assert (found.steps, found.rows, found.cached_tokens) == (4, 2.5, 32)
    assert (found.beside, found.beside_s) == ({"r9": 520}, 0.25)
    assert found.preemptions == [Preemption(at_s=3.0, by="r4", tokens=412, waited_s=0.5)]
    assert (found.preemption_count, found.preempted_s) == (1, 0.5)


def test_only_the_first_names_are_reported() -> None:
    works = NodeWorks()
    with works.call("llm"):
        record = works.record("llm")
        record.admit()
        record.beside = {f"r{number}.1.1.llm": number for number in range(100)}
        record.evictions = tuple(Eviction(at_s=13.0, by="a.1.1.llm") for _ in range(MAX_NAMED + 1))
        record.eviction_count = 30
    found = works.report()["llm"]

    assert list(found.beside) == [f"r{99 - number}" for number in range(MAX_NAMED)]
    assert len(found.preemptions) == MAX_NAMED
    assert found.preemption_count == 30


def test_a_report_without_work_is_as_it_was_before_the_field() -> None:
    event = WalkCompleted(rank=0, results=[])

    assert b"work" not in encode(event)
    assert decode(encode(event), "done") == event
    filled = WalkCompleted(rank=0, results=[], work={"llm": NodeWork(calls=1, took_s=0.5)})
    assert decode(encode(filled), "done") == filled
