"""Results of control replays, as text."""

from conductor.core.replay import Verdict
from dalsegno.replay.verdicts import ControlResult, lines, weights_of

NODES = {"prepare": "a" * 64, "llm": "b" * 64, "decode/llm": "b" * 64}


def result(weights: dict[str, str], adopted: int = 1) -> ControlResult:
    return ControlResult(verdict=Verdict(request_id="r1", adopted=adopted, weights=weights))


def test_the_weights_of_one_request_are_named() -> None:
    assert weights_of([result(NODES)]) == [f"weights: llm {'b' * 12}, prepare {'a' * 12}"]


def test_requests_are_counted_by_their_weights_and_older_ones_once() -> None:
    results = [result(NODES), result({}), result(NODES), result({}), result({}, adopted=0)]
    assert weights_of(results) == [
        f"weights: llm {'b' * 12}, prepare {'a' * 12} (2 requests)",
        "weights: not recorded, by an older version (2 requests)",
    ]


def test_a_continuation_on_other_weights_is_noted() -> None:
    verdict = Verdict(request_id="r1", changed_weights=["attempt 2 had other weights: llm had b, has c"])
    assert "r1: note: attempt 2 had other weights: llm had b, has c" in lines(ControlResult(verdict=verdict))
