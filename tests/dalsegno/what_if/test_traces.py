"""Traces: written from a log, read again, simulated."""

import msgspec
import pytest

from dalsegno.what_if import times, traces
from dalsegno.what_if.recorded_load import Asked
from dalsegno.what_if.traces import BLOCK, Call, TraceError
from shared.quantile import quantile
from tests.conductor.script import SUBJECTS
from tests.dalsegno.what_if.test_times import AROUND, load_of, served, side


def test_a_log_is_written_as_it_came() -> None:
    load = load_of(served())
    calls = traces.read("\n".join(traces.lines_of(load.requests)), "trace")
    assert len(calls) == len(load.requests)
    assert calls[0].timestamp == 0
    for call, asked in zip(calls, load.requests, strict=True):
        assert call.output_length == asked.tokens
        assert call.timestamp == pytest.approx((asked.at_ns - load.requests[0].at_ns) / 1e6, abs=1)
        assert len(call.hash_ids) == -(-call.input_length // BLOCK)


def test_equal_beginnings_have_equal_ids() -> None:
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    first = traces._hash_ids(range(2 * BLOCK), known)
    longer = traces._hash_ids(range(2 * BLOCK + 5), known)
    other = traces._hash_ids([7, *range(1, 2 * BLOCK)], known)
    assert longer[:2] == first
    assert len({*longer, *other}) == 5, "a block behind another beginning has another id"


def test_equal_ids_become_equal_tokens_and_others_do_not() -> None:
    one = Call(timestamp=0, input_length=700, output_length=1, hash_ids=[3, 4])
    two = msgspec.structs.replace(one, hash_ids=[3, 5])
    prompt, other = traces._prompt(one, 0), traces._prompt(two, 1)
    assert len(prompt) == len(other) == 700
    assert prompt[:BLOCK] == other[:BLOCK]
    assert not set(prompt[BLOCK:]) & set(other[BLOCK:])
    unnamed = msgspec.structs.replace(one, hash_ids=[])
    assert not set(traces._prompt(unnamed, 0)) & set(traces._prompt(unnamed, 1))


def test_the_trace_of_a_log_takes_as_long_as_the_log() -> None:
    load = load_of(served())
    calls = traces.read("\n".join(traces.lines_of(load.requests)), "trace")
    asked = traces.asked_of(calls, load.requests, "demo", SUBJECTS)
    found = times.predict(
        load, load.requests, side(), side(max_concurrent_requests=2), AROUND, seeds=1, instead=asked
    )
    recorded = found.calibration["latency p50, s"].recorded
    assert found.baseline["latency p50, s"] == pytest.approx(recorded, rel=0.1)
    truth = quantile(served(places=2).latencies, 0.5)
    assert found.predicted["latency p50, s"].value == pytest.approx(truth, rel=0.15)
    assert found.outcomes["simulated"] == {"finished": len(calls)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{}", "timestamp"),
        ("nonsense", "line 1"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length >= 1"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "expected 2 hash_ids"),
        ("", "found none"),
    ],
)
def test_what_is_no_trace_is_named(line: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        traces.read(line, "trace")


def test_without_a_language_model_there_is_nothing_to_take() -> None:
    call = Call(timestamp=0, input_length=1, output_length=1)
    bare: list[Asked] = []
    with pytest.raises(TraceError, match="language model"):
        traces.asked_of([call], bare, "demo", SUBJECTS)
