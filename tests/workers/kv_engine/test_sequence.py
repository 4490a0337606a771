from typing import Any

import pytest

from workers.kv_engine.sequence import Sequence
from workers.kv_engine.sequence_spec import FinishReason, Sampling, SequenceSpec

EOS = 9


def spec(**changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {
        "key": "a",
        "prompt_ids": [1, 2, 3],
        "max_tokens": 4,
        "eos_ids": frozenset({EOS}),
    }
    return SequenceSpec(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "token", "generated", "reason"),
    [
        ({}, 5, 1, None),
        ({}, EOS, 1, FinishReason.STOP),
        ({}, 5, 4, FinishReason.LENGTH),
        ({}, EOS, 4, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, 1, None),
        ({"ignore_eos": True}, EOS, 4, FinishReason.LENGTH),
        ({"eos_ids": frozenset()}, EOS, 3, None),
    ],
)
def test_an_answer_ends_at_eos_or_at_its_limit(
    changes: dict[str, Any], token: int, generated: int, reason: FinishReason | None
) -> None:
    assert spec(**changes).finish_reason(token, generated) is reason


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [([], None), ([5], None), ([5, EOS], FinishReason.STOP), ([5, 5, 5, 5], FinishReason.LENGTH)],
)
def test_a_prefix_may_have_ended_the_answer_already(prefix: list[int], reason: FinishReason | None) -> None:
    assert spec(prefix_ids=prefix).finished is reason


def test_a_prefix_counts_as_generated_and_is_still_to_compute() -> None:
    sequence = Sequence(spec(prefix_ids=[7, 8]))

    assert sequence.ids == [1, 2, 3, 7, 8]
    assert (sequence.generated, sequence.pending, sequence.reserved_tokens) == (2, 5, 7)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": 2**63},
        {"sample_index": -1},
    ],
)
def test_invalid_sampling_parameters_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Sampling(**changes)
