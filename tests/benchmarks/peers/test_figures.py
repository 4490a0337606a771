"""What is made of the times of tokens, against figures worked out by hand."""

import pytest

from benchmarks.peers.figures import ALONE, OURS, Measured, Wave, report
from benchmarks.report import Figure


def _wave(*arrivals: list[float], texts: tuple[str, ...] | None = None) -> Wave:
    return Wave(list(arrivals), list(texts or [" any" * len(times) for times in arrivals]))


STEADY = _wave([0.5, 0.6, 0.7], [0.7, 0.8, 1.0])
"""Gaps of 100, 100, 100 and 200 ms, and 6 tokens in a second."""


def _measured(*waves: Wave, clients: int = 2, ready_s: float = 5.0, is_server: bool = True) -> Measured:
    return Measured(ready_s=ready_s, is_server=is_server, waves={clients: list(waves)})


def _named(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_tokens_that_arrive_together_share_the_time_before_them() -> None:
    wave = Wave([[1.0, 1.0, 1.3, 1.3, 1.3, 1.5]], [" a b c d e f"])

    assert wave.gap_s == pytest.approx(0.1)
    assert wave.decode_tokens_per_s == pytest.approx(10)


def test_tokens_a_second_count_the_prompts_time_and_decoded_ones_do_not() -> None:
    assert STEADY.tokens_per_s == pytest.approx(6)
    assert STEADY.decode_tokens_per_s == pytest.approx(2 / 0.1)
    assert STEADY.first_s == pytest.approx(0.6)


def test_gaps_are_between_the_tokens_of_a_request_and_never_of_two() -> None:
    assert STEADY.gap_s == pytest.approx(0.1)
    assert STEADY.long_gap_s == pytest.approx(0.2)


def test_ours_is_compared_with_the_best_of_the_others_round_by_round() -> None:
    slow, fast = _wave([1.0, 2.0]), _wave([0.25, 0.5])
    found = {
        OURS: _measured(fast, slow, clients=1),
        "good": _measured(slow, slow, clients=1, ready_s=50.0),
        "bad": _measured(_wave([8.0, 9.0]), _wave([8.0, 9.0]), clients=1, is_server=False, ready_s=1.0),
    }
    compared = _named(report(found, [1e9, 1e9], 10**8)["compared"])

    output = compared["1 at a time: output tokens/s, ours / the best"]
    assert output.value == pytest.approx((4 + 1) / 2)
    assert output.note == "1.00 to 4.00; 2.5; good: 1.0"
    first = compared["1 at a time: first token, ours / the fastest"]
    assert first.value == pytest.approx((0.25 + 1) / 2)
    assert compared["ready to serve, ours / the fastest server"].value == pytest.approx(5 / 50)


def test_what_serving_costs_is_held_against_the_engine_alone_which_is_nobody_to_beat() -> None:
    found = {OURS: _measured(_wave([1.0, 2.0]), clients=1), ALONE: _measured(_wave([0.5, 1.0]), clients=1)}
    compared = _named(report(found, [1e9], 10**8)["compared"])

    assert compared["1 at a time: output tokens/s, served / engine alone"].value == pytest.approx(0.5)
    assert not [name for name in compared if "the best" in name]


def test_a_single_requests_decode_is_told_as_a_share_of_what_memory_allows() -> None:
    found = {"peer": _measured(_wave([1.0, 1.2, 1.4]), clients=1)}
    figures = report(found, [1e9, 2e9], 10**8)

    assert _named(figures["memory"])["memory limit of tokens/s, 1 at a time"].value == pytest.approx(20)
    assert _named(figures["peer"])["1 at a time: decode, share of the memory limit"].value == pytest.approx(
        25
    )
    assert "compared" not in figures


def test_answers_agree_up_to_the_first_token_that_is_another_one() -> None:
    one = _wave([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], texts=(" a b c", " a b c"))
    other = _wave([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], texts=(" a b c", " a x c"))
    figures = _named(report({OURS: _measured(one), "peer": _measured(other)}, [1e9], 10**8)["peer"])

    assert figures["2 at a time: tokens equal to ours, up to the first difference"].value == pytest.approx(
        100 * 4 / 6
    )
