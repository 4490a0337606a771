"""The plan: its walks and their arguments. Recorded histories replay, so the arguments must not change."""

from typing import Any

import pytest

from models.decoder_lm.graph import GRAPH
from shared.errors import ClientError
from shared.events import Guide, Inputs, Limits, Params, Usage, WalkResult
from shared.plan_run import PendingStep, PlanRun
from shared.plans import Finish, PlanRequest, StepResult, Walk
from shared.tensors import inline_ids

SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
PROMPT = inline_ids("p", [5, 6, 7])


def journey(**params: Any) -> PlanRun:
    limits = Limits(max_seq_len=16, kv_tokens=100, default_max_tokens=4)
    asked = Params(**params)
    return PlanRun(
        GRAPH,
        PlanRequest(request_id="r", inputs=Inputs(text="hi"), params=asked, limits=limits, seed=1),
    )


def prepared(prompt_tokens: int = 3) -> StepResult:
    facts = {"prompt_tokens": prompt_tokens, "sampling": SAMPLING, "prompt_text": "hi"}
    return StepResult((WalkResult(name="prepare", facts=facts, outputs={"token_ids": PROMPT}),))


def walks(at_hand: tuple[PendingStep, ...] | Finish) -> dict[str, Walk]:
    assert not isinstance(at_hand, Finish)
    (step,) = at_hand
    return {walk.name: walk for walk in step.walks}


def test_a_plain_request_has_the_arguments_of_the_first_version() -> None:
    """Literally: histories that the first version recorded are replayed against this."""
    found = walks(journey(stop=["x"]).advance([(0, prepared())]))

    args = {"max_tokens": 4, "sampling": SAMPLING, "stop": ["x"], "ignore_eos": False}
    assert list(found) == ["prefill", "decode"]
    assert found["prefill"].call().args == found["decode"].call().args == args
    assert found["prefill"].inputs == {"token_ids": PROMPT}


def test_the_stop_texts_of_a_checkpoint_are_for_requests_without_any() -> None:
    facts = {"prompt_tokens": 3, "sampling": SAMPLING, "stop": ["###"]}
    step = StepResult((WalkResult(name="prepare", facts=facts, outputs={"token_ids": PROMPT}),))

    for asked, expected in ([], ["###"]), (["x"], ["x"]):
        found = walks(journey(stop=asked).advance([(0, step)]))
        assert found["prefill"].call().args["stop"] == found["decode"].call().args["stop"] == expected


@pytest.mark.parametrize(
    ("params", "args"),
    [
        ({"choice": 2}, {"choice": 2}),
        ({"stop_token_ids": [4, 5]}, {"stop_token_ids": [4, 5]}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": 5, "echo": True}, {"logprobs": 5, "echo": "hi"}),
        ({"logprobs": 5, "echo": "ids"}, {"logprobs": 5, "echo": "hi", "echoes_ids": True}),
        ({"guide": Guide(regex="a+")}, {"guide": {"regex": "a+"}}),
    ],
)
def test_optional_arguments_are_given_to_the_first_walk_only(
    params: dict[str, Any], args: dict[str, Any]
) -> None:
    plain = walks(journey().advance([(0, prepared())]))

    found = walks(journey(**params).advance([(0, prepared())]))

    assert found["prefill"].call().args == {**plain["prefill"].call().args, **args}
    assert found["decode"] == plain["decode"]


def test_a_guided_answer_with_ignore_eos_exhausts_its_guide() -> None:
    guide = Guide(regex="a+")
    found = walks(journey(guide=guide, ignore_eos=True).advance([(0, prepared())]))["prefill"].call().args

    assert {name: found[name] for name in ("guide", "ignore_eos", "exhausts_guide")} == {
        "guide": {"regex": "a+"}, "ignore_eos": False, "exhausts_guide": True,
    }  # fmt: skip


def test_an_echo_alone_is_one_walk_and_uses_no_new_token() -> None:
    asked = journey(max_tokens=0, echo=True, logprobs=1)
    found = walks(asked.advance([(0, prepared(16))]))

    assert list(found) == ["score"]
    assert found["score"].call().args["echo"] == "hi"
    result = WalkResult(name="score", facts={"completion_tokens": 0, "finish_reason": "length"})
    assert asked.advance([(0, prepared(16)), (1, StepResult((result,)))]) == Finish(
        usage=Usage(prompt_tokens=16), finish_reasons=("length",)
    )


def test_an_echo_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ClientError, match="context length is 16 tokens, but 17"):
        journey(max_tokens=0, echo=True).advance([(0, prepared(17))])
