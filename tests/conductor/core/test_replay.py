"""A replay agrees with an honest log, and with no other."""

import re
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import pytest

from conductor.core import cluster
from conductor.core.replay import Replayer, Verdict
from shared.events import (
    EpochOpened,
    Event,
    NodeReady,
    OutputChunk,
    OutputTotals,
    RequestFinished,
    decode,
    encode,
)
from shared.log.port import StoredRecord
from shared.models import registry
from shared.models.base import ModelGraph
from shared.plans import Chain, Plan, PlanRequest, StepResult, Walk
from shared.transcript import Transcript
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
    assert verdict.adopted == 1


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
    monkeypatch.setattr(cluster, "KEEP_ENDED", 1)
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
    assert "none counts" in verdict.mismatch.what


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
