"""Times of traces without them, and lengths of texts."""

import pytest

from dalsegno.traces.calls import AnyCall, Call, TextCall, Trace, TraceError, counted, timed


def trace(*calls: AnyCall, form: str = "vllm") -> Trace:
    return Trace(name="t", form=form, calls=list(calls))


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_requests_with_times_come_in_their_order_from_the_first_on() -> None:
    late, early = (Call(timestamp=at, input_length=1, output_length=1) for at in (900.0, 400.0))
    assert [one.timestamp for one in timed(trace(late, early), None).calls] == [0.0, 500.0]
    with pytest.raises(TraceError, match="times of their own"):
        timed(trace(late, early), 5.0)


def test_requests_without_times_come_at_once_or_at_a_rate() -> None:
    texts = trace(*(TextCall(text=str(number)) for number in range(2000)))
    assert {one.timestamp for one in timed(texts, None).calls} == {0.0}
    spread = [one.timestamp or 0.0 for one in timed(texts, 50.0).calls]
    assert spread == sorted(spread)
    assert spread[-1] / 1e3 == pytest.approx(2000 / 50, rel=0.1)
    assert spread == [one.timestamp for one in timed(texts, 50.0).calls], "the seed is fixed"


def test_texts_are_counted_and_share_the_blocks_that_they_share() -> None:
    first = TextCall(text="a" * 40, timestamp=0.0, output_length=3)
    second = TextCall(text="a" * 20 + "b" * 20, timestamp=1.0, answer="four")
    known = Call(timestamp=2.0, input_length=5, output_length=1)
    one, two, three = counted(trace(first, second, known), letters)
    assert (one.input_length, one.output_length, two.output_length) == (40, 3, 4)
    assert one.hash_ids[0] == two.hash_ids[0]
    assert len({*one.hash_ids, *two.hash_ids}) == 5
    assert three is known


def test_an_answer_of_unknown_length_is_refused() -> None:
    with pytest.raises(TraceError, match=r"t, line 3: expected the length of the answer \(output_tokens\)"):
        counted(trace(TextCall(text="a", line=3)), letters)
    with pytest.raises(TraceError, match=r"\(output_length\)"):
        counted(trace(TextCall(text="a", line=3), form="aiperf"), letters)
