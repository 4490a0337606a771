import pytest

from dalsegno.history.request_filter import RequestFilter
from dalsegno.history.summary import Summary

SECOND_NS = 1_000_000_000
NOW_NS = 100 * SECOND_NS


def summary(**fields: object) -> Summary:
    usual: dict[str, object] = {
        "request_id": "r1",
        "model": "demo",
        "tenant": "alice",
        "seq": 1,
        "start_ns": 10 * SECOND_NS,
        "end_ns": 12 * SECOND_NS,
        "outcome": "failed",
        "code": "step_failed",
        "ranks": [0, 2],
    }
    return Summary(**usual | fields)  # type: ignore[arg-type]


def accepts(wanted: RequestFilter, **fields: object) -> bool:
    return wanted.accepts(summary(**fields), NOW_NS)


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        ("outcome", "failed", "open"),
        ("code", "step_failed", "queue_full"),
        ("tenant", "alice", "bob"),
        ("model", "demo", "other"),
        ("rank", 2, 1),
    ],
)
def test_a_request_is_chosen_and_left_out_by_what_it_has(kind: str, own: object, other: object) -> None:
    assert accepts(RequestFilter(chosen={kind: frozenset({own})}))
    assert accepts(RequestFilter(chosen={kind: frozenset({own, other})}))
    assert not accepts(RequestFilter(chosen={kind: frozenset({other})}))
    assert not accepts(RequestFilter(excluded={kind: frozenset({own})}))
    assert not accepts(RequestFilter(excluded={kind: frozenset({own, other})}))
    assert accepts(RequestFilter(excluded={kind: frozenset({other})}))


def test_all_kinds_of_choices_apply() -> None:
    wanted = RequestFilter(chosen={"outcome": frozenset({"failed"}), "tenant": frozenset({"alice"})})
    assert accepts(wanted)
    assert not accepts(wanted, outcome="finished")
    assert not accepts(wanted, tenant=None)


def test_a_request_without_a_value_is_not_chosen_by_any_and_left_out_by_none() -> None:
    assert not accepts(RequestFilter(chosen={"rank": frozenset({0})}), ranks=[])
    assert accepts(RequestFilter(excluded={"code": frozenset({"step_failed"})}), code=None)


def test_a_time_range_has_its_beginning_and_not_its_end() -> None:
    start_ns = summary().start_ns
    assert accepts(RequestFilter(since_ns=start_ns, until_ns=start_ns + 1))
    assert not accepts(RequestFilter(since_ns=start_ns + 1))
    assert not accepts(RequestFilter(until_ns=start_ns))


def test_a_duration_is_compared_exactly_and_that_of_an_open_request_so_far() -> None:
    assert accepts(RequestFilter(slower_than_s=1.9, faster_than_s=2.1))
    assert not accepts(RequestFilter(slower_than_s=2.0))
    assert not accepts(RequestFilter(faster_than_s=2.0))
    assert accepts(RequestFilter(slower_than_s=89.0), end_ns=None)
    assert not accepts(RequestFilter(slower_than_s=90.0), end_ns=None)
    assert not accepts(RequestFilter(faster_than_s=1000.0), end_ns=None), "it may become slower"


def test_a_prompt_has_to_contain_all_texts_and_none_of_the_excluded() -> None:
    prompt = "What does\n  SORTED do?\nReturn\ta Straße"
    assert RequestFilter(texts=("what does sorted", "STRASSE")).accepts_prompt(prompt)
    assert not RequestFilter(texts=("sorted", "zip")).accepts_prompt(prompt)
    assert not RequestFilter(excluded_texts=("zip", "sorted")).accepts_prompt(prompt)
    assert RequestFilter(excluded_texts=("zip",)).accepts_prompt(prompt)


def test_only_an_empty_filter_chooses_nothing() -> None:
    assert not RequestFilter().chooses
    assert RequestFilter(excluded_texts=("zip",)).chooses
    assert not RequestFilter(since_ns=1).reads_prompts
    assert RequestFilter(excluded_texts=("zip",)).reads_prompts
