"""Traces: written from a log, read again, simulated."""

import msgspec
import pytest

from dalsegno.traces import writing
from dalsegno.traces.calls import BLOCK, Call, TextCall, TraceError, counted, hash_ids
from dalsegno.traces.formats import parsed
from dalsegno.traces.writing import LENGTHS, TEXTS, LengthFormat, TextFormat
from dalsegno.what_if import times, traces
from dalsegno.what_if.recorded_load import Asked
from shared.events import Inputs
from shared.quantile import quantile
from tests.conductor.script import SUBJECTS
from tests.dalsegno.what_if.test_times import AROUND, load_of, served, side


def written(asked: list[Asked], form: LengthFormat = "mooncake") -> list[Call]:
    """The trace of recorded requests, written and read again."""
    lines = writing.lines_of(traces.calls_of(asked), form, 'a, "model"')
    return counted(parsed("\n".join(lines), "trace"), lambda _: [])


def test_a_log_is_written_as_it_came() -> None:
    load = load_of(served())
    calls = written(load.requests)
    assert len(calls) == len(load.requests)
    assert calls[0].timestamp == 0
    for call, asked in zip(calls, load.requests, strict=True):
        assert call.output_length == asked.tokens
        assert call.timestamp == pytest.approx((asked.at_ns - load.requests[0].at_ns) / 1e6, abs=1)
        assert len(call.hash_ids) == -(-call.input_length // BLOCK)


@pytest.mark.parametrize("form", LENGTHS)
def test_each_written_format_is_read_as_it_was(form: LengthFormat) -> None:
    load = load_of(served())
    calls = list(traces.calls_of(load.requests))
    if form == "burstgpt":
        calls = [msgspec.structs.replace(one, hash_ids=[]) for one in calls]
    assert written(load.requests, form) == calls


@pytest.mark.parametrize("form", TEXTS)
def test_prompts_are_read_as_they_were_written(form: TextFormat) -> None:
    asked = load_of(served()).requests[:4]
    inputs = [
        Inputs(text='A line\nand "another"'),
        Inputs(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]),
        Inputs(token_ids=[1, 2]),
        Inputs(text=" "),
    ]
    for one, given in zip(asked, inputs, strict=True):
        one.event = msgspec.structs.replace(one.event, inputs=given)
    calls = list(traces.texts_of(asked))
    assert [one.text for one in calls] == ['A line\nand "another"', "Be brief.\nWhy?"]
    read = parsed("\n".join(writing.lines_with_texts(calls, form)), "trace").calls
    for found, call, was in zip(read, calls, asked[:2], strict=True):
        assert isinstance(found, TextCall)
        assert (found.text, found.output_length) == (call.text, was.tokens)
        assert found.timestamp == (None if form == "vllm" else call.timestamp)


def test_equal_beginnings_have_equal_ids() -> None:
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    first = hash_ids(range(2 * BLOCK), known)
    longer = hash_ids(range(2 * BLOCK + 5), known)
    other = hash_ids([7, *range(1, 2 * BLOCK)], known)
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
    calls = written(load.requests)
    asked = traces.asked_of(calls, load.requests, "demo", SUBJECTS)
    found = times.predict(
        load, load.requests, side(), side(max_concurrent_requests=2), AROUND, seeds=1, instead=asked
    )
    recorded = found.calibration["latency p50, s"].recorded
    assert found.baseline["latency p50, s"] == pytest.approx(recorded, rel=0.1)
    truth = quantile(served(places=2).latencies, 0.5)
    assert found.predicted["latency p50, s"].value == pytest.approx(truth, rel=0.15)
    assert found.outcomes["simulated"] == {"finished": len(calls)}


def test_without_a_language_model_there_is_nothing_to_take() -> None:
    call = Call(timestamp=0, input_length=1, output_length=1)
    bare: list[Asked] = []
    with pytest.raises(TraceError, match="language model"):
        traces.asked_of([call], bare, "demo", SUBJECTS)
