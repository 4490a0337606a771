"""Plans: generators over recorded results, rebuilt from them at any time."""

import pytest

from shared.errors import BugError
from shared.events import Inputs, Limits, Params, Usage, WalkResult
from shared.plans import Chain, Finish, Journey, Plan, PlanRequest, StepResult, Walk
from shared.tensors import inline_ids

REQUEST = PlanRequest(
    request_id="r",
    inputs=Inputs(text="hi"),
    params=Params(),
    limits=Limits(max_seq_len=8, kv_tokens=8, default_max_tokens=4),
    seed=1,
)


class Counting:
    """A model whose journey depends on what came back: as many `think` walks as `prepare` says."""

    def __init__(self) -> None:
        self.started = 0

    def plan(self, request: PlanRequest) -> Plan:
        self.started += 1
        prepared = yield Walk("prepare", args={"text": request.inputs.text})
        for number in range(prepared.fact("thoughts")):
            yield Walk("think", args={"number": number})
        yield Chain(Walk("prefill"), Walk("decode"))
        return Finish(usage=Usage(prompt_tokens=1), finish_reasons=("stop",))


def result(**facts: int) -> StepResult:
    return StepResult((WalkResult(name="w", facts=facts),))


RESULTS = (result(thoughts=2), result(), result(), result())


def test_a_journey_goes_where_the_facts_lead() -> None:
    journey = Journey(Counting(), REQUEST)
    names = []
    for done in range(4):
        step = journey.advance(RESULTS[:done])
        assert not isinstance(step, Finish)
        names.append([w.name for w in (step.walks if isinstance(step, Chain) else (step,))])
    assert names == [["prepare"], ["think"], ["think"], ["prefill", "decode"]]
    assert isinstance(journey.advance(RESULTS), Finish)


@pytest.mark.parametrize("done", range(5))
def test_a_journey_rebuilt_from_its_results_goes_on_as_before(done: int) -> None:
    model = Counting()
    journey = Journey(model, REQUEST)
    for reached in range(done + 1):
        live = journey.advance(RESULTS[:reached])
    assert model.started == 1
    assert Journey(Counting(), REQUEST).advance(RESULTS[:done]) == live


def test_asking_twice_for_the_same_step_is_the_same_step() -> None:
    journey = Journey(Counting(), REQUEST)
    assert journey.advance(RESULTS[:1]) == journey.advance(RESULTS[:1])


def test_results_behind_the_plans_return_are_an_error() -> None:
    with pytest.raises(BugError, match="more results"):
        Journey(Counting(), REQUEST).advance((*RESULTS, result()))


def test_a_plan_that_returns_no_finish_is_an_error() -> None:
    class Forgetful:
        def plan(self, request: PlanRequest) -> Plan:
            yield Walk("prepare")
            return None  # type: ignore[return-value]  # what is tested

    with pytest.raises(BugError, match="must return a Finish"):
        Journey(Forgetful(), REQUEST).advance((result(),))


def test_a_fact_nobody_reported_is_named_with_those_there_are() -> None:
    with pytest.raises(BugError, match=r"'tokens'.*\['thoughts'\]"):
        result(thoughts=1).fact("tokens")


def test_a_handle_is_that_of_the_last_walk_that_put_it_out() -> None:
    walks = tuple(WalkResult(name=n, outputs={"ids": inline_ids(n, [1])}) for n in ("a", "b"))
    assert StepResult(walks).handle("ids").key == "b"
    with pytest.raises(BugError, match="latents"):
        StepResult(walks).handle("latents")
