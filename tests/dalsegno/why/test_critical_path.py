"""The critical path covers the whole time of a request, each instant once, and names what it waited for."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.placement import PlacedGroup
from dalsegno.history.summary import Summary
from dalsegno.replay import recorded_request
from dalsegno.why.critical_path import critical_path
from dalsegno.why.parts import Kind, Part
from dalsegno.why.request_facts import RequestFacts
from shared.events import (
    Failure,
    NodeReady,
    NodeWork,
    ProcessEnd,
    RequestSubmitted,
    WorkerJoined,
    WorkerLost,
    decode,
    encode,
)
from shared.ids import Rank
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor.script import SUBJECTS, Script, deployment
from tests.simulation.invariants import run
from tests.simulation.simulator import Simulation

HISTORIES = sorted((Path(__file__).parents[2] / "histories").glob("*.bundle"))
MS = 1_000_000


def path_of(
    records: list[StoredRecord], request_id: str = "r1", neighbours: list[Summary] | None = None
) -> list[Part]:
    facts = RequestFacts.of(records, SUBJECTS, request_id)
    return critical_path(facts, neighbours or [], facts.until_ns)


def assert_whole(parts: list[Part], total_ns: int) -> None:
    """The parts follow one another from the submission to the end."""
    assert sum(part.duration_ns for part in parts) == total_ns
    assert all(part.duration_ns > 0 for part in parts)
    assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(parts))
    assert not parts or (parts[0].begin_ns, parts[-1].end_ns) == (0, total_ns)
    assert all(part.text for part in parts)


@pytest.mark.parametrize("bundle", HISTORIES, ids=lambda path: path.stem)
def test_the_parts_of_a_recorded_request_add_up_to_its_time(bundle: Path) -> None:
    history = recorded_request.of_bundle(str(bundle))
    for request_id in history.requests:
        facts = RequestFacts.of(history.records, history.subjects, request_id)
        parts = critical_path(facts, [], facts.until_ns)

        assert_whole(parts, facts.until_ns - facts.submitted_ns)


@pytest.mark.parametrize("first", range(0, 72, 12))
def test_the_parts_add_up_whatever_is_lost_late_or_killed(first: int) -> None:
    explained = 0
    for seed in range(first, first + 12):
        simulation = Simulation(seed)
        run(simulation)
        submitted = {
            str(event.request_id)
            for event in simulation.log.events
            if isinstance(event, RequestSubmitted) and event.request_id is not None
        }
        for request_id in submitted:
            facts = RequestFacts.of(simulation.log.records, SUBJECTS, request_id)
            parts = critical_path(facts, [], facts.until_ns)

            assert_whole(parts, facts.until_ns - facts.submitted_ns)
            explained += bool(parts)
    assert explained > 12


# ---- a log that is written by hand -----------------------------------------------------------------------


def later(records: list[StoredRecord], seq: int, seconds: float) -> list[StoredRecord]:
    """The records with those from `seq` on so much later."""
    shift_ns = round(seconds * 1e9)
    return [
        msgspec.structs.replace(record, time_ns=record.time_ns + (shift_ns if record.seq >= seq else 0))
        for record in records
    ]


def seq_of(records: list[StoredRecord], kind: str, number: int = 0) -> int:
    """The position of the record of a type."""
    found = [record.seq for record in records if kind.encode() in record.data]
    return found[number]


def answered(**completion: Any) -> list[StoredRecord]:
    """The log of one request that is prepared and answered."""
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.complete(script.last(NodeReady))
    script.complete(script.last(NodeReady), **completion)
    return script.records


def kinds(parts: list[Part]) -> list[Kind]:
    return [part.kind for part in parts]


def longest(parts: list[Part]) -> Part:
    return max(parts, key=lambda part: part.duration_ns)


def test_a_wait_for_admission_names_those_that_had_the_places() -> None:
    script = Script(serve=deployment(max_concurrent_requests=1))
    script.open_epoch()
    script.join()
    script.submit("first")
    script.submit("r1")
    at = len(script.records) + 1
    script.run_to_the_end("first")
    script.run_to_the_end("r1")
    records = later(script.records, at, 1.4)
    first = RequestFacts.of(records, SUBJECTS, "first")
    assert first.admitted is not None
    assert first.end is not None
    neighbour = Summary(
        request_id="first",
        model="demo",
        seq=1,
        start_ns=first.submitted_ns,
        admitted_ns=first.admitted.time_ns,
        end_ns=first.end.time_ns,
    )
    part = longest(path_of(records, neighbours=[neighbour]))

    assert part.kind is Kind.ADMISSION
    assert part.requests == ["first"]
    assert "waited for a place behind first (" in part.text
    assert "concurrent request 1 of 1" in part.text
    assert 1.4 < part.duration_ns / 1e9 < 1.5


def test_an_admission_without_a_wait_names_nobody() -> None:
    records = answered()
    neighbour = Summary(
        request_id="other", model="demo", seq=1, start_ns=1, admitted_ns=2, end_ns=records[4].time_ns
    )

    assert all(not part.requests for part in path_of(records, neighbours=[neighbour]))


def test_a_wait_in_the_engine_names_those_before_it() -> None:
    work = {
        "llm": NodeWork(
            calls=2,
            took_s=2.0,
            waited_s=1.5,
            lacked="places",
            behind=["r8", "r9"],
            behind_count=2,
            first_token_s=1.7,
            steps=40,
            rows=2.0,
            cached_tokens=16,
        )
    }
    records = later(answered(work=work), seq_of(answered(work=work), "walk.completed", 1), 2.0)
    parts = [part for part in path_of(records) if part.step == 1]

    assert kinds(parts) == [Kind.QUEUE, Kind.PREFILL, Kind.DECODE, Kind.TRANSIT]
    assert parts[0].text == "llm on rank 0 waited for a place in the batch behind r8 and r9"
    assert parts[0].requests == ["r8", "r9"]
    assert parts[1].text == "llm on rank 0 computed up to its first token, with 16 cached tokens"
    assert parts[2].text == "llm on rank 0 decoded over 40 engine steps, 2 sequences together"
    assert [round(part.duration_ns / 1e9, 3) for part in parts[:3]] == [1.5, 0.2, 0.3]


def test_a_preemption_names_who_took_the_blocks() -> None:
    preemption = {"at_s": 0.5, "by": "r4", "tokens": 412, "waited_s": 0.6}
    work = {
        "llm": {
            "calls": 2,
            "took_s": 2.0,
            "first_token_s": 0.1,
            "steps": 9,
            "rows": 1.0,
            "preemptions": [preemption],
            "preemption_count": 1,
            "preempted_s": 0.6,
        }
    }
    found = msgspec.convert(work, dict[str, NodeWork])
    records = later(answered(work=found), seq_of(answered(work=found), "walk.completed", 1), 2.0)
    [part] = [part for part in path_of(records) if part.kind is Kind.PREEMPTED]

    assert part.text == "llm on rank 0 was preempted by r4, 412 tokens computed again"
    assert part.requests == ["r4"]
    assert part.duration_ns == 600 * MS


def test_prompts_of_neighbours_are_named_with_their_tokens() -> None:
    work = {
        "llm": NodeWork(
            calls=2, took_s=2.0, first_token_s=0.1, steps=9, rows=1.5, beside={"r9": 4096}, beside_s=1.2
        )
    }
    records = later(answered(work=work), seq_of(answered(work=work), "walk.completed", 1), 2.0)
    [part] = [part for part in path_of(records) if part.kind is Kind.NEIGHBOURS]

    assert part.text == "llm on rank 0 decoded beside the prompts of r9 (4,096 tokens)"
    assert part.duration_ns == 1200 * MS


def test_a_killed_worker_is_named_with_its_signal_its_silence_and_its_loading() -> None:
    script = Script()
    script.open_epoch()
    join = WorkerJoined(
        id="a",
        writer="w0",
        rank=0,
        model="demo",
        nodes=["prepare", "llm"],
        device="cpu",
        kv_tokens=128,
        pid=7,
    )
    script.say(SUBJECTS.worker(0), join)
    script.submit()
    script.complete(script.last(NodeReady))
    begun = len(script.records)
    life = script.cluster.world.incarnation(0)
    lost = WorkerLost(
        id="lost",
        writer=CONDUCTOR_WRITER,
        epoch=1,
        rank=0,
        incarnation=life,
        reason="no heartbeat for 1.6 s",
        silent_s=1.6,
    )
    lost_seq = script.say(SUBJECTS.lost, lost)
    died_ns = script.records[begun - 1].time_ns + 2_000 * MS
    end = ProcessEnd(pid=7, ended_ns=died_ns, signal="SIGKILL", last_line="step 12")
    joined_seq = script.say(SUBJECTS.worker(0), msgspec.structs.replace(join, id="b", pid=8, ended=[end]))
    script.run_to_the_end()
    records = later(later(script.records, lost_seq, 3.6), joined_seq, 5.4)
    parts = path_of(records)
    total_s = {
        kind: sum(part.duration_ns for part in parts if part.kind is kind) / 1e9 for kind in set(kinds(parts))
    }

    assert total_s[Kind.LOST] == pytest.approx(2.0, abs=0.01)
    assert total_s[Kind.SILENT] == pytest.approx(1.6, abs=0.01)
    assert total_s[Kind.AWAY] == pytest.approx(5.4, abs=0.01)
    [away] = [part for part in parts if part.kind is Kind.AWAY]
    assert away.text == (
        "without rank 0 (killed by SIGKILL; no heartbeat for 1.6 s), "
        "until its process started and loaded the model"
    )
    assert away.rank == 0


def test_a_change_of_leaders_is_named() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.complete(script.last(NodeReady))
    ready = script.last(NodeReady)
    script.lead = False
    script.complete(ready)
    script.lead = True
    opened = script.open_epoch(2, "c2")
    script.publish(list(script.request().expected.values()))
    records = later(script.records, opened, 1.9)
    [part] = [part for part in path_of(records) if part.kind is Kind.NO_CONDUCTOR]

    assert part.text == "no conductor led, until c2 opened epoch 2"
    assert 1.9 <= part.duration_ns / 1e9 < 1.95


def test_an_open_request_is_explained_up_to_now() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.complete(script.last(NodeReady))
    facts = RequestFacts.of(script.records, SUBJECTS, "r1")
    now_ns = script.records[-1].time_ns + 5_000 * MS
    parts = critical_path(facts, [], now_ns)

    assert_whole(parts, now_ns - facts.submitted_ns)
    assert parts[-1].kind is Kind.RUNNING
    assert parts[-1].text == "step 1 (prefill+decode) ran, and has reported nothing"


def test_a_report_of_a_worker_without_the_order_explains_nothing() -> None:
    records = answered()
    at = seq_of(records, "walk.completed", 1)
    event = decode(records[at - 1].data)
    forged = msgspec.structs.replace(event, incarnation=99, work={"llm": NodeWork(calls=1, took_s=9.0)})
    records[at - 1] = msgspec.structs.replace(records[at - 1], data=encode(forged))

    assert all(part.kind is not Kind.NODE or part.step != 1 for part in path_of(records))


def test_a_rank_that_was_lost_before_is_not_blamed_for_a_later_failure() -> None:
    script = Script(
        serve=deployment(
            groups=(PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=(Rank(0), Rank(1))),)
        )
    )
    script.open_epoch()
    script.join("w0-a", rank=0)
    script.submit()
    script.complete(script.last(NodeReady))
    script.join("w1-a", rank=1)
    script.lose(0)
    back = script.join("w0-b", rank=0)
    ready = script.last(NodeReady)
    assert ready.rank == 1
    failed = script.fail(ready, Failure(code="broken", message="it broke"))
    records = later(script.records, failed, 20.0)
    parts = path_of(records)

    assert back < failed
    assert longest(parts).kind is Kind.RUNNING
    assert all(part.duration_ns < 1_000 * MS for part in parts if part.kind in {Kind.SILENT, Kind.AWAY})


def test_a_request_that_still_waits_names_those_that_have_the_places() -> None:
    script = Script(serve=deployment(max_concurrent_requests=1))
    script.open_epoch()
    script.join()
    script.submit("first")
    script.submit("r1")
    facts = RequestFacts.of(script.records, SUBJECTS, "r1")
    first = RequestFacts.of(script.records, SUBJECTS, "first")
    assert first.admitted is not None
    neighbour = Summary(
        request_id="first",
        model="demo",
        seq=1,
        start_ns=first.submitted_ns,
        admitted_ns=first.admitted.time_ns,
    )
    [part] = critical_path(facts, [neighbour], facts.submitted_ns + 30_000 * MS)

    assert (part.kind, part.requests) == (Kind.ADMISSION, ["first"])
    assert part.text == "it waited for a place behind first"


def test_an_end_by_coincidence_is_no_cause() -> None:
    records = answered()
    admitted = seq_of(records, "request.admitted")
    slow = later(records, admitted, 0.05)
    facts = RequestFacts.of(slow, SUBJECTS, "r1")
    neighbour = Summary(
        request_id="other",
        model="demo",
        seq=1,
        start_ns=1,
        admitted_ns=2,
        end_ns=facts.submitted_ns + 20 * MS,
    )
    parts = path_of(slow, neighbours=[neighbour])

    assert parts[0].text.startswith("it waited for admission (")
    assert "concurrent request 1 of 8" in parts[0].text
    assert all(not part.requests for part in parts)


def test_a_change_of_leaders_in_the_last_moment_does_not_explain_the_whole_wait() -> None:
    script = Script(serve=deployment(max_concurrent_requests=1))
    script.open_epoch()
    script.join()
    script.submit("first")
    script.submit("r1")
    opened = script.open_epoch(2, "c2")
    script.publish(list(script.request("first").expected.values()))
    script.run_to_the_end("first")
    script.run_to_the_end("r1")
    records = later(script.records, opened, 10.0)
    parts = path_of(records)

    assert parts[0].kind is Kind.ADMISSION
    assert parts[0].duration_ns > 9_900 * MS


def test_a_worker_that_is_back_before_anybody_missed_it_was_away_and_not_silent() -> None:
    script = Script()
    script.open_epoch()
    join = WorkerJoined(
        id="a",
        writer="w0",
        rank=0,
        model="demo",
        nodes=["prepare", "llm"],
        device="cpu",
        kv_tokens=128,
        pid=7,
    )
    script.say(SUBJECTS.worker(0), join)
    script.submit()
    script.complete(script.last(NodeReady))
    died_ns = script.records[-1].time_ns + 500 * MS
    end = ProcessEnd(pid=7, ended_ns=died_ns, signal="SIGKILL")
    joined = script.say(SUBJECTS.worker(0), msgspec.structs.replace(join, id="b", pid=8, ended=[end]))
    script.run_to_the_end()
    parts = path_of(later(script.records, joined, 1.5))
    [away] = [part for part in parts if part.kind is Kind.AWAY]

    assert away.duration_ns == pytest.approx(1_000 * MS, abs=10 * MS)
    assert away.text.startswith("without rank 0 (killed by SIGKILL), until its process started")
    assert Kind.SILENT not in kinds(parts)
