"""A replay agrees with an honest log, and with no other."""

import contextlib
import re
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import pytest

from conductor.core import replay as replay_module
from conductor.core.replay import Replayer, Verdict
from conductor.core.retention import REPLAY
from models import registry
from models.base import ModelGraph
from shared.events import (
    EpochOpened,
    Event,
    Inputs,
    NodeFired,
    NodeReady,
    OutputChunk,
    OutputTotals,
    RequestFinished,
    StreamTotals,
    WalkCompleted,
    decode,
    encode,
)
from shared.log.port import StoredRecord
from shared.plans import Chain, Plan, PlanRequest, StepResult, Walk
from shared.transcript import Transcript
from tests.conductor import speech
from tests.conductor.script import SUBJECTS, Script


def told(*, lives: int = 1) -> list[StoredRecord]:
    """The log of one finished request with three chunks, whose rank had so many lives."""
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("before")
    script.submit("r1")
    script.complete(script.last(NodeReady))
    for life in range(1, lives):
        script.join(f"w0-{life}")
    ready = script.last(NodeReady)
    transcript = Transcript()
    for index in range(3):
        chunk = OutputChunk(
            id=f"r1.chunk.{index}",
            writer="w0",
            request_id="r1",
            attempt=ready.attempt,
            incarnation=ready.incarnation,
            index=index,
            text=f"t{index}",
            text_offset=2 * index,
            token_ids=[index],
            token_offset=index,
        )
        transcript.fold(chunk)
        script.say(SUBJECTS.output("nats", "r1", "w0"), chunk)
    script.complete(ready, output=transcript.totals)
    assert script.last(RequestFinished) is not None
    return script.records


def of_request(records: list[StoredRecord], request_id: str = "r1") -> list[StoredRecord]:
    """What a replay of one request reads of a log."""
    patterns = [
        re.compile(s.replace(".", r"\.").replace("*", "[^.]+") + "$") for s in SUBJECTS.replayed(request_id)
    ]
    return [record for record in records if any(p.match(record.subject) for p in patterns)]


def replay(
    records: list[StoredRecord], graph_of: Callable[[str], ModelGraph] = registry.graph
) -> Verdict | None:
    return Replayer(graph_of, SUBJECTS).run(records).get("r1")


@pytest.mark.parametrize("lives", [1, 2, 3])
def test_an_honest_log_matches(lives: int) -> None:
    verdict = replay(of_request(told(lives=lives)))
    assert verdict is not None
    assert verdict.mismatch is None
    assert verdict.phase == "finished"
    assert verdict.decided == 3 + 2 * (lives - 1)
    assert verdict.adopted == lives  # its admission, and each time it was resumed


def test_a_late_completion_of_a_step_that_is_over_is_no_claim_about_the_output() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("r1")
    first = script.last(NodeReady)
    script.complete(first)
    script.complete(first, id="r1.late", output=OutputTotals(chunks=9, digest="of another step"))
    script.complete(script.last(NodeReady), output=Transcript().totals)
    verdict = replay(of_request(script.records))
    assert verdict is not None
    assert verdict.mismatch is None


def test_a_whole_log_is_replayed_at_once() -> None:
    verdicts = Replayer(registry.graph, SUBJECTS).run(told())
    assert list(verdicts) == ["before", "r1"]
    assert all(verdict.matches for verdict in verdicts.values())


def test_a_submission_that_cannot_be_read_must_be_refused_in_the_log() -> None:
    script = Script()
    script.open_epoch()
    script.say(SUBJECTS.request("r1"), b"junk")
    verdict = replay(of_request(script.records))
    assert verdict is not None
    assert verdict.matches
    assert verdict.phase == "rejected"
    assert str(verdict.refusal).startswith("malformed_request: ")
    unanswered = replay(of_request(script.records[:-1]))
    assert unanswered is not None
    assert not unanswered.matches


def test_a_request_that_ended_long_ago_is_not_called_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "REPLAY", msgspec.structs.replace(REPLAY, ended=1))
    script = Script()
    script.open_epoch()
    script.join()
    for request_id in ("r1", "r2"):
        script.submit(request_id)
        script.run_to_the_end(request_id)
    verdicts = Replayer(registry.graph, SUBJECTS).run(script.records)
    assert [verdict.phase for verdict in verdicts.values()] == ["finished", "finished"]


@pytest.mark.parametrize("lives", [1, 2])
def test_a_dropped_event_makes_it_fail(lives: int) -> None:
    records = of_request(told(lives=lives))
    for number, gone in enumerate(records):
        verdict = replay(records[:number] + records[number + 1 :])
        assert verdict is None or not verdict.matches, decode(gone.data)


def mutations(event: Event) -> Generator[Event, None, None]:
    """The event with each of its own fields changed, one at a time."""
    for info in msgspec.structs.fields(event):
        name, value = info.name, getattr(event, info.name)
        if name in {"id", "writer", "number", "trace", "durations_s", "metadata", "origin", "pid", "host"}:
            continue
        for other in _others(value):
            with contextlib.suppress(ValueError):  # no such event can be made
                yield msgspec.structs.replace(event, **{name: other})


def _others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value + 1]
        case str():
            return [value + "x"]
        case bytes():
            return [b"x" + value]
        case list():
            return [[]] if value else []
        case dict():
            return [{key: _others(item)[0] for key, item in value.items() if _others(item)}] if value else []
        case OutputTotals():
            return [OutputTotals(chunks=value.chunks + 1, digest=value.digest)]
        case msgspec.Struct():
            return list(mutations(value))[:2]  # type: ignore[arg-type]
        case _:
            return []


def test_a_mutated_event_makes_it_fail() -> None:
    records = of_request(told(lives=2))
    tried = 0
    for number, record in enumerate(records):
        address = SUBJECTS.parse(record.subject)
        assert address is not None
        if address.kind in {"worker", "conductor"}:
            continue
        event = decode(record.data)
        for mutant in mutations(event):
            data = encode(mutant)
            if data == record.data:
                continue
            tried += 1
            changed = StoredRecord(record.seq, record.subject, data, record.time_ns)
            verdict = replay([*records[:number], changed, *records[number + 1 :]])
            assert verdict is None or not verdict.matches, (event, mutant)
    assert tried > 50


def test_an_epoch_that_was_raised_makes_it_fail_for_its_decisions_become_void() -> None:
    records = of_request(told())
    opened = decode(records[0].data)
    assert isinstance(opened, EpochOpened)
    raised = encode(msgspec.structs.replace(opened, epoch=2))
    verdict = replay([StoredRecord(records[0].seq, records[0].subject, raised, 0), *records[1:]])
    assert verdict is not None
    assert verdict.mismatch is not None
    assert "have no effect" in verdict.mismatch.what


def another_plan(request: PlanRequest) -> Plan:
    """As the real one, but it asks for prefill and decode apart."""
    prepared: StepResult = yield Walk("prepare", args={"inputs": request.inputs, "params": request.params})
    yield Chain(Walk("prefill", inputs={"token_ids": prepared.handle("token_ids")}))
    raise AssertionError("never reached: the replay stops at the first difference")


def test_a_changed_plan_makes_it_fail_and_both_sides_are_shown() -> None:
    real = registry.graph("decoder_lm")
    changed = ModelGraph(family=real.family, nodes=real.nodes, walks=real.walks, plan=another_plan)
    verdict = replay(of_request(told()), lambda _: changed)
    assert verdict is not None
    mismatch = verdict.mismatch
    assert mismatch is not None
    assert mismatch.expected is not None
    assert mismatch.recorded is not None
    assert mismatch.state is not None
    assert [walk["name"] for walk in mismatch.expected["walks"]] == ["prefill"]
    assert [walk["name"] for walk in mismatch.recorded["walks"]] == ["prefill", "decode"]
    assert mismatch.state["steps_done"] == 1


def test_a_differing_digest_is_named_first() -> None:
    records = of_request(told())
    replayer = Replayer(registry.graph, SUBJECTS, pins=lambda _: {"core": "another", "graph": "g"})
    verdict = replayer.run(records)["r1"]
    assert verdict.matches
    assert verdict.pins == ["core was k, is another"]


def test_a_truncated_log_says_what_is_missing() -> None:
    records = [r for r in of_request(told()) if not isinstance(decode(r.data), RequestFinished)]
    verdict = replay(records)
    assert verdict is not None
    assert verdict.mismatch is not None
    assert "r1.end" in verdict.mismatch.what


# ---- on many ranks -------------------------------------------------------------------------------

CODES = StreamTotals(items=6, chunks=4)


def spoken(*, lives: int = 1, codes: StreamTotals = CODES) -> list[StoredRecord]:
    """The log of one request of two partitions on three ranks, of which one had so many lives."""
    script = Script(serve=speech.deployment("three"), graph_of=speech.graph_of)
    script.open_epoch()
    for rank in range(3):
        script.join(f"w{rank}-a", rank)
    script.submit("r1", inputs=Inputs(text="duet"))
    script.say(SUBJECTS.done(0, "r1"), speech.part(script.last(NodeReady)))
    for life in range(1, lives):
        script.join(f"w2-{life}", 2)
    render, _, decode = script.events(NodeReady, "r1")[-3:]
    transcript = Transcript()
    for index in range(3):
        for track, ready in (("talker", decode), ("vocoder", render)):
            chunk = OutputChunk(
                id=f"r1.chunk.{track}.{index}",
                writer=f"w{ready.rank}",
                request_id="r1",
                attempt=ready.attempt,
                incarnation=ready.incarnation,
                index=index,
                track=track,
                text=f"t{index}",
            )
            transcript.fold(chunk)
            script.say(SUBJECTS.output("nats", "r1", f"w{ready.rank}"), chunk)
    fired = NodeFired(id="f", writer="w0", request_id="r1", attempt=1, walk=0, node="talker", path=())
    script.say(SUBJECTS.edge(1, 0, "r1"), fired)
    cut = {"codes": codes}
    tracks = {name: transcript.tracks[name].totals for name in ("talker", "vocoder")}
    for ready in script.events(NodeReady, "r1")[-3:]:
        mine = {"talker": tracks["talker"]} if ready.rank == 1 else {}
        if ready.rank == 2:
            mine = {"vocoder": tracks["vocoder"]}
        done = speech.part(ready, tracks=mine, streams=cut if ready.rank == 2 else {})
        script.say(SUBJECTS.done(ready.rank, "r1"), done)
    for walk in ("master", "go_on", "sign"):
        order = [one for one in script.events(NodeReady, "r1") if one.walks[0].name == walk][-1]
        script.say(SUBJECTS.done(order.rank, "r1"), speech.part(order))
    assert script.last(RequestFinished) is not None
    return script.records


def replay_speech(records: list[StoredRecord]) -> Verdict:
    verdict = replay(of_request(records), speech.graph_of)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize("lives", [1, 2, 3])
def test_an_honest_log_of_many_ranks_matches(lives: int) -> None:
    verdict = replay_speech(spoken(lives=lives))
    assert verdict.mismatch is None
    assert (verdict.phase, verdict.decided) == ("finished", 8 + 6 * (lives - 1))


def changed(records: list[StoredRecord], number: int, **fields: Any) -> list[StoredRecord]:
    record = records[number]
    data = encode(msgspec.structs.replace(decode(record.data), **fields))
    return [*records[:number], StoredRecord(record.seq, record.subject, data, 0), *records[number + 1 :]]


def test_a_track_that_is_reported_otherwise_than_it_is_in_the_log_makes_it_fail() -> None:
    records = spoken()
    reports = [n for n, r in enumerate(records) if getattr(decode(r.data), "tracks", {})]
    assert len(reports) == 2
    for number in reports:
        event = decode(records[number].data)
        assert isinstance(event, WalkCompleted)
        ((track, totals),) = event.tracks.items()
        wrong = OutputTotals(chunks=totals.chunks, digest="of something else")
        mismatch = replay_speech(changed(records, number, tracks={track: wrong})).mismatch
        assert mismatch is not None
        assert (mismatch.seq, mismatch.what) == (
            number + 1,
            f"{event.id} reports an output that is not the one in the log",
        )


@pytest.mark.parametrize(
    "streams",
    [
        {"codes": StreamTotals(items=6, chunks=3)},
        {"codes": StreamTotals(items=7, chunks=5)},
        {"codes": StreamTotals(items=6, chunks=4, left=True)},
        {"words": StreamTotals(items=6, chunks=3)},
        {"nothing": StreamTotals()},
    ],
)
def test_a_stream_that_was_cut_otherwise_than_its_policy_does_makes_it_fail(
    streams: dict[str, StreamTotals],
) -> None:
    records = spoken()
    (number,) = [n for n, r in enumerate(records) if getattr(decode(r.data), "streams", {})]
    mismatch = replay_speech(changed(records, number, streams=streams)).mismatch
    assert mismatch is not None
    assert (mismatch.seq, "reports other chunks" in mismatch.what) == (number + 1, True)


def test_a_stream_that_was_left_has_every_window_of_what_its_chunks_had_and_no_final_one() -> None:
    assert replay_speech(spoken(codes=StreamTotals(items=6, chunks=3, left=True))).matches
    assert not replay_speech(spoken(codes=StreamTotals(items=6, chunks=2, left=True))).matches


def test_edges_are_passed_over() -> None:
    records = spoken()
    without = [r for r in records if not isinstance(decode(r.data), NodeFired)]
    assert len(without) == len(records) - 1
    assert replay_speech(without).matches


def test_garbage_on_an_edge_is_passed_over_as_the_ranks_did() -> None:
    records = [
        msgspec.structs.replace(r, data=b"garbage") if isinstance(decode(r.data), NodeFired) else r
        for r in spoken()
    ]
    assert sum(r.data == b"garbage" for r in records) == 1
    assert replay_speech(records).matches


@pytest.mark.parametrize("kind", ["walk", "request", "done"])
def test_what_a_server_answers_is_no_part_of_a_request(kind: str) -> None:
    """Whoever may ask it something may have its answer stored, on any subject (ADR 11)."""
    answer = b'{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","message":{"seq":1}}'
    subject = {"walk": SUBJECTS.walk("r1"), "request": SUBJECTS.request("r1"), "done": SUBJECTS.done(0, "r1")}
    records = told()
    junk = StoredRecord(records[-1].seq + 1, subject[kind], answer, 0)
    verdict = replay(of_request([*records, junk]))
    assert verdict is not None
    assert verdict.mismatch is None


def test_garbage_that_anybody_may_write_is_no_part_of_a_request() -> None:
    records = told()
    last = records[-1].seq
    junk = StoredRecord(last + 1, SUBJECTS.control("r1"), b"junk", 0)
    verdict = replay(of_request([*records, junk]))
    assert verdict is not None
    assert verdict.mismatch is None


@pytest.mark.slow
def test_a_mutated_event_of_many_ranks_makes_it_fail() -> None:
    records = spoken(lives=2)
    for number, record in enumerate(records):
        event = decode(record.data)
        if record.subject.split(".")[1] in {"worker", "conductor", "edge"}:
            continue
        for mutant in mutations(event):
            if encode(mutant) != record.data:
                data = StoredRecord(record.seq, record.subject, encode(mutant), 0)
                verdict = replay([*records[:number], data, *records[number + 1 :]], speech.graph_of)
                assert verdict is None or not verdict.matches, (event, mutant)


def test_what_a_rank_without_an_order_wrote_is_named_and_changes_nothing() -> None:
    records = told()
    forged = OutputChunk(
        id="forged", writer="w9", request_id="r1", attempt=1, incarnation=7, index=1, text="FORGED"
    )
    strangers = [
        (SUBJECTS.output("nats", "r1", "w9"), encode(forged)),
        (SUBJECTS.done(9, "r1"), b"\xff nonsense"),
        (SUBJECTS.done(9, "r1"), b"\xff more of it"),
    ]
    first = next(place for place, one in enumerate(records) if "output" in one.subject)
    mixed = [*records[:first], *(StoredRecord(0, at, data, 0) for at, data in strangers), *records[first:]]
    mixed = [msgspec.structs.replace(one, seq=seq) for seq, one in enumerate(mixed, start=1)]

    verdict = replay(mixed)

    assert verdict is not None
    assert verdict.mismatch is None
    assert verdict.ignored == {
        "w9: a writer without an order; the request is placed on w0": 1,
        "w9: unreadable, by a writer without an order": 2,
    }


def test_an_unreadable_record_of_a_rank_with_an_order_is_a_mismatch() -> None:
    records = told()
    damaged = [
        msgspec.structs.replace(one, data=b"\xff") if one.subject.endswith("w0") else one for one in records
    ]
    verdict = replay(damaged)
    assert verdict is not None
    assert verdict.mismatch is not None
    assert "unreadable" in verdict.mismatch.what
