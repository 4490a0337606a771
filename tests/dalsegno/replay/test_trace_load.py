"""A trace's requests as submissions: lengths, shared beginnings, times."""

import itertools

import pytest

from dalsegno.history.reply import Reply
from dalsegno.replay import trace_load
from dalsegno.replay.trace_load import submissions, tokens_of
from dalsegno.traces.calls import AnyCall, Call, TextCall, Trace


def trace(*calls: AnyCall) -> Trace:
    return Trace(name="t", form="mooncake", calls=list(calls))


def call(*names: int, length: int = 700) -> Call:
    return Call(timestamp=0, input_length=length, output_length=3, hash_ids=list(names))


def test_blocks_of_equal_names_are_equal_tokens_of_any_vocabulary() -> None:
    one, two = tokens_of(call(3, 4), 0), tokens_of(call(3, 5), 1)
    assert len(one) == len(two) == 700
    assert one[:512] == two[:512]
    assert one[512:] != two[512:]
    assert set(one) <= set(range(8))


def test_requests_without_names_share_nothing() -> None:
    prompts = [tokens_of(call(), number) for number in range(50)]
    prompts += [tokens_of(call(number, number), number) for number in range(50)]
    assert all(one[:16] != other[:16] for one, other in itertools.combinations(prompts, 2))


def test_two_runs_share_nothing() -> None:
    assert tokens_of(call(3, 4), 0, salt=1)[:16] != tokens_of(call(3, 4), 0, salt=2)[:16]
    assert tokens_of(call(3, 4), 0, salt=1)[512:] == tokens_of(call(3, 4), 0, salt=2)[512:]
    first, second = (submissions(trace(call(3, 4)), "demo", 1.0)[0].event.inputs for _ in range(2))
    assert len(first.token_ids or []) == len(second.token_ids or []) == 700


def test_requests_have_the_lengths_and_times_of_the_trace() -> None:
    asked = submissions(
        trace(call(1, 2), Call(timestamp=3000.0, input_length=5, output_length=0)), "demo", speed=2.0
    )
    assert [one.after_s for one in asked] == [0.0, 1.5]
    assert [len(one.event.inputs.token_ids or []) for one in asked] == [700, 5]
    assert [(one.event.params.max_tokens, one.event.params.ignore_eos) for one in asked] == [
        (3, True),
        (1, True),
    ]
    assert len({one.event.request_id for one in asked}) == 2


def test_texts_are_asked_and_end_by_themselves_if_nothing_tells_their_length() -> None:
    told = TextCall(text="a", timestamp=0.0, output_length=7)
    untold = TextCall(text="b", timestamp=0.0, answer="a text")
    first, second = (one.event for one in submissions(trace(told, untold), "demo", 1.0))
    assert (first.inputs.text, first.params.max_tokens, first.params.ignore_eos) == ("a", 7, True)
    assert (second.inputs.text, second.params.max_tokens, second.params.ignore_eos) == ("b", None, False)


@pytest.mark.parametrize(("calls", "tokens"), [((call(1, 2), call(1, 3)), 6), ((TextCall(text="a"),), None)])
def test_the_report_has_what_the_trace_asks_for(calls: tuple[AnyCall, ...], tokens: int | None) -> None:
    lines, data = trace_load.report(trace(*calls), [Reply() for _ in calls], 1.0)
    assert (data["trace"]["finished"], data["trace"]["tokens"]) == (len(calls), tokens)
    assert data["now"]["finished"] == 0
    assert lines[0].startswith(f"load replay of {len(calls)} request")
