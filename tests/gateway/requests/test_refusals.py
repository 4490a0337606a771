"""The counts are exact, and neither the number of events nor their size is up to clients."""

from gateway.requests.refusals import (
    MAX_ROWS,
    MAX_SAMPLES,
    MESSAGE_CHARS,
    NAME_CHARS,
    SAMPLES_PER_ROW,
    RefusalTally,
    sample,
)
from shared.events import Refusal, RequestsRefused, encode


def refusal(code: str = "invalid_value", tenant: str | None = None, time_ns: int = 1) -> Refusal:
    return sample(code, 400, "wrong", time_ns=time_ns, tenant=tenant)


def taken(tally: RefusalTally) -> RequestsRefused:
    event = tally.take("g.refused.1", "g")
    assert event is not None
    return event


def test_without_refusals_there_is_no_event() -> None:
    tally = RefusalTally()
    assert not tally
    assert tally.take("g.refused.1", "g") is None


def test_ten_thousand_refusals_are_one_event_with_exact_counts() -> None:
    tally = RefusalTally()
    for number in range(10_000):
        tally.add(refusal("a" if number % 4 else "b", "alice" if number % 2 else None, number))
    event = taken(tally)

    found = {(one.code, one.tenant): one.count for one in event.counts}
    assert found == {("b", None): 2500, ("a", "alice"): 5000, ("a", None): 2500}
    assert event.since_ns == 0
    assert len(event.samples) == 3 * SAMPLES_PER_ROW
    assert (event.id, event.writer) == ("g.refused.1", "g")
    assert not tally


def test_the_samples_are_the_first_of_each_kind_in_order_of_time() -> None:
    tally = RefusalTally()
    for number in range(1000):
        tally.add(refusal("flood", time_ns=number))
    tally.add(refusal("rare", "alice", 5000))
    samples = taken(tally).samples

    assert [(one.code, one.time_ns) for one in samples] == [
        ("flood", 0), ("flood", 1), ("flood", 2), ("flood", 3), ("rare", 5000),
    ]  # fmt: skip


def test_a_field_that_is_rarely_wrong_has_a_sample_beside_one_that_is_often_wrong() -> None:
    tally = RefusalTally()
    fields = ["messages"] * 1000 + ["temperature"] + ["messages"] * 9 + ["top_p", "top_k", "seed"]
    for number, name in enumerate(fields):
        tally.add(sample("invalid_value", 400, "wrong", time_ns=number, param=name))
    event = taken(tally)

    assert [one.param for one in event.samples] == ["messages", "temperature", "top_p", "top_k"]
    assert [one.time_ns for one in event.samples] == [0, 1000, 1010, 1011]
    assert event.counts[0].count == len(fields)


def test_many_kinds_have_a_sample_each_before_one_has_two() -> None:
    tally = RefusalTally()
    for number in range(2 * MAX_SAMPLES):
        tally.add(refusal(f"code-{number // 2}", time_ns=number))
    samples = taken(tally).samples

    assert [one.code for one in samples] == [f"code-{number}" for number in range(MAX_SAMPLES)]


def test_what_does_not_fit_into_an_event_is_in_the_next_one() -> None:
    tally = RefusalTally()
    for number in range(3 * MAX_ROWS // 2):
        tally.add(refusal(f"code-{number}"))
    first, second = taken(tally), taken(tally)

    counted = [one.code for event in (first, second) for one in event.counts]
    assert len(first.counts) == MAX_ROWS
    assert counted == [f"code-{number}" for number in range(3 * MAX_ROWS // 2)]
    assert {one.code for one in second.samples} <= {one.code for one in second.counts}
    assert not tally


def test_the_longest_texts_make_an_event_of_bounded_size() -> None:
    tally, long = RefusalTally(), "\U0001f600" * 10_000
    for number in range(2 * MAX_ROWS):
        for _ in range(2):
            tally.add(
                sample(
                    f"{'c' * 60}{number}", 400, long, time_ns=2**62, param=long, tenant="\U0001f600" * 64,
                    route=long, request_id=long, correlation=long,
                )
            )  # fmt: skip
    event = taken(tally)

    assert len(event.samples) == MAX_SAMPLES
    assert len(encode(event)) <= 96 * 1024


def test_a_text_that_is_cut_says_so() -> None:
    cut = sample("a", 400, "x" * 1000, time_ns=1, param="y" * 1000)
    assert cut.message == "x" * (MESSAGE_CHARS - 1) + "…"
    assert cut.param == "y" * (NAME_CHARS - 1) + "…"
    whole = sample("a", 400, "x" * MESSAGE_CHARS, time_ns=1)
    assert whole.message == "x" * MESSAGE_CHARS


def test_the_requests_key_is_removed_from_what_quotes_it() -> None:
    found = sample(
        "a",
        400,
        "the model 'sk-1' does not exist",
        time_ns=1,
        param="sk-1",
        correlation="sk-1",
        secret="sk-1",
    )
    assert found.message == "the model '[key]' does not exist"
    assert "sk-1" not in str(found)
