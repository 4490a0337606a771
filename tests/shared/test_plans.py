"""Plans: generators over recorded results, rebuilt from them at any time."""

from collections.abc import Callable, Generator

import pytest

from shared.errors import BugError, ClientError
from shared.events import Inputs, Limits, Params, Usage, WalkResult
from shared.plan_run import PendingStep, PlanRun, RecordedResult
from shared.plans import (
    Chain,
    Finish,
    Join,
    Plan,
    PlanRequest,
    Start,
    Step,
    StepResult,
    SubPlan,
    Walk,
)
from shared.tensors import inline_ids

REQUEST = PlanRequest(
    request_id="r",
    inputs=Inputs(text="hi"),
    params=Params(),
    limits=Limits(max_seq_len=8, kv_tokens=8, default_max_tokens=4),
    seed=1,
)


class Counting:
    """A model whose plan depends on results: it runs as many `think` walks as `prepare` reports."""

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


RESULTS = tuple(enumerate((result(thoughts=2), result(), result(), result())))


def names(at_hand: tuple[PendingStep, ...] | Finish) -> list[tuple[int, str, tuple[str, ...]]]:
    """Return the index, the partition and the walks of each pending step."""
    assert not isinstance(at_hand, Finish)
    return [(step.index, step.partition, tuple(walk.name for walk in step.walks)) for step in at_hand]


def test_a_journey_goes_where_the_facts_lead() -> None:
    journey = PlanRun(Counting(), REQUEST)
    assert [names(journey.advance(RESULTS[:done])) for done in range(4)] == [
        [(0, "", ("prepare",))],
        [(1, "", ("think",))],
        [(2, "", ("think",))],
        [(3, "", ("prefill", "decode"))],
    ]
    assert isinstance(journey.advance(RESULTS), Finish)


@pytest.mark.parametrize("done", range(5))
def test_a_journey_rebuilt_from_its_results_goes_on_as_before(done: int) -> None:
    model = Counting()
    journey = PlanRun(model, REQUEST)
    for reached in range(done + 1):
        live = journey.advance(RESULTS[:reached])
    assert model.started == 1
    assert PlanRun(Counting(), REQUEST).advance(RESULTS[:done]) == live


def test_asking_twice_for_the_same_step_is_the_same_step() -> None:
    journey = PlanRun(Counting(), REQUEST)
    assert journey.advance(RESULTS[:1]) == journey.advance(RESULTS[:1])


def test_results_behind_the_plans_return_are_an_error() -> None:
    with pytest.raises(BugError, match="more results"):
        PlanRun(Counting(), REQUEST).advance((*RESULTS, (4, result())))


def test_a_plan_that_returns_no_finish_is_an_error() -> None:
    class Forgetful:
        def plan(self, request: PlanRequest) -> Plan:
            yield Walk("prepare")
            return None  # type: ignore[return-value]  # what is tested

    with pytest.raises(BugError, match="must return a Finish"):
        PlanRun(Forgetful(), REQUEST).advance([(0, result())])


def test_a_fact_nobody_reported_is_named_with_those_there_are() -> None:
    with pytest.raises(BugError, match=r"'tokens'.*\['thoughts'\]"):
        result(thoughts=1).fact("tokens")


def test_a_handle_is_that_of_the_last_walk_that_put_it_out() -> None:
    walks = tuple(WalkResult(name=n, outputs={"ids": inline_ids(n, [1])}) for n in ("a", "b"))
    assert StepResult(walks).handle("ids").key == "b"
    with pytest.raises(BugError, match="latents"):
        StepResult(walks).handle("latents")


# ---- sub-plans -----------------------------------------------------------------------------------


class Duet:
    """Two partitions that run concurrently, after a first and before a last step without them."""

    def plan(self, request: PlanRequest) -> Plan:
        yield Walk("prepare")
        yield Start("singer", self.sing())
        yield Start("piano", self.play())
        bars = yield Join("piano")
        yield Walk("applaud", ends=("song",))
        verses = yield Join("singer")
        yield Walk("bow", args={"bars": bars, "verses": verses})
        return Finish(usage=Usage(), finish_reasons=("stop",))

    def sing(self) -> SubPlan:
        yield Walk("verse")
        last = yield Chain(Walk("verse", ends=("breath",)), Walk("refrain"), ends=("song", "breath"))
        return last.fact("verses")

    def play(self) -> Generator[Step, StepResult, int]:
        played = yield Walk("bar")
        bars: int = played.fact("bars")
        return bars


DUET: tuple[RecordedResult, ...] = (
    (0, result()),
    (1, result()),
    (2, result(bars=9)),
    (3, result(verses=2)),
    (4, result()),
    (5, result()),
)


def test_sub_plans_run_at_the_same_time_each_with_one_step_at_hand() -> None:
    journey = PlanRun(Duet(), REQUEST)
    assert [names(journey.advance(DUET[:done])) for done in range(6)] == [
        [(0, "", ("prepare",))],
        [(1, "singer", ("verse",)), (2, "piano", ("bar",))],
        [(2, "piano", ("bar",)), (3, "singer", ("verse", "refrain"))],
        [(3, "singer", ("verse", "refrain")), (4, "", ("applaud",))],
        [(4, "", ("applaud",))],
        [(5, "", ("bow",))],
    ]
    bow = journey.advance(DUET[:5])
    assert not isinstance(bow, Finish)
    assert bow[0].walks[0].args == {"bars": 9, "verses": 2}
    assert isinstance(journey.advance(DUET), Finish)


def test_indices_follow_from_the_order_of_the_results() -> None:
    piano_first: list[RecordedResult] = [(0, result()), (2, result(bars=9))]
    assert names(PlanRun(Duet(), REQUEST).advance(piano_first)) == [
        (1, "singer", ("verse",)),
        (3, "", ("applaud",)),
    ]


@pytest.mark.parametrize("done", range(7))
def test_sub_plans_are_made_anew_for_a_journey_that_is_rebuilt(done: int) -> None:
    live = PlanRun(Duet(), REQUEST)
    for reached in range(done + 1):
        at_hand = live.advance(DUET[:reached])
    assert PlanRun(Duet(), REQUEST).advance(DUET[:done]) == at_hand
    assert live.advance(DUET[:1]) == PlanRun(Duet(), REQUEST).advance(DUET[:1])  # and for one cut back


def test_a_journey_is_not_fooled_by_other_results_of_the_same_number() -> None:
    journey = PlanRun(Counting(), REQUEST)
    journey.advance([(0, result(thoughts=2))])
    assert names(
        journey.advance(
            [
                (0, result(thoughts=0)),
            ]
        )
    ) == [(1, "", ("prefill", "decode"))]


def test_the_streams_a_step_ends_are_told_with_it() -> None:
    journey = PlanRun(Duet(), REQUEST)
    ends: dict[int, tuple[str, ...]] = {}
    for done in range(6):
        at_hand = journey.advance(DUET[:done])
        assert not isinstance(at_hand, Finish)
        ends |= {step.index: step.ends for step in at_hand}
    assert ends == {0: (), 1: (), 2: (), 3: ("breath", "song"), 4: ("song",), 5: ()}


def test_what_a_step_came_to_hand_behind_is_known_and_where_it_last_ran_alone() -> None:
    journey = PlanRun(Duet(), REQUEST)
    journey.advance(DUET)
    assert [journey.results_before(index) for index in range(7)] == [0, 1, 1, 2, 3, 5, None]
    assert [journey.restart_point(count) for count in range(7)] == [0, 1, 1, 1, 1, 5, 6]


def test_sub_plans_may_have_sub_plans() -> None:
    class Nested:
        def plan(self, request: PlanRequest) -> Plan:
            yield Start("outer", self.outer())
            finish = yield Join("outer")
            assert isinstance(finish, Finish)
            return finish

        def outer(self) -> SubPlan:
            yield Start("inner", self.inner())
            yield Walk("a")
            return (yield Join("inner"))

        def inner(self) -> SubPlan:
            yield Walk("b")
            return Finish(usage=Usage(), finish_reasons=("stop",))

    journey = PlanRun(Nested(), REQUEST)
    assert names(journey.advance([])) == [(0, "inner", ("b",)), (1, "outer", ("a",))]
    assert isinstance(journey.advance([(0, result()), (1, result())]), Finish)


def nothing() -> SubPlan:
    yield from ()


def sings() -> SubPlan:
    yield Walk("sing")


def unjoined() -> SubPlan:
    yield Start("a", nothing())
    return Finish(usage=Usage(), finish_reasons=())


def twice() -> SubPlan:
    yield Start("a", nothing())
    yield Join("a")
    yield Start("a", nothing())


def unnamed() -> SubPlan:
    yield Start("", nothing())


def stranger() -> SubPlan:
    yield Start("a", sings())
    yield Join("b")


def joined_twice() -> SubPlan:
    yield Start("a", nothing())
    yield Join("a")
    yield Join("a")


def nonsense() -> SubPlan:
    yield "a walk"  # type: ignore[misc]  # what is tested


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (unjoined, r"the plan returned, but has not joined \['a'\]"),
        (twice, "as 'a', which was started before"),
        (unnamed, "without a name"),
        (stranger, r"joins 'b'; started and not joined are \['a'\]"),
        (joined_twice, r"joins 'a'; started and not joined are \[\]"),
        (nonsense, "may yield a Walk, Chain, Start or Join, not 'a walk'"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_what_no_plan_may_do_is_an_error(plan: Callable[[], SubPlan], message: str, *, inside: bool) -> None:
    class Wrong:
        def plan(self, request: PlanRequest) -> Plan:
            if not inside:
                return (yield from plan())  # type: ignore[no-any-return]  # what is tested
            yield Start("one", plan())
            yield Join("one")
            return Finish(usage=Usage(), finish_reasons=())

    if inside:
        message = message.replace("the plan", "the sub-plan 'one'")
    with pytest.raises(BugError, match=message):
        PlanRun(Wrong(), REQUEST).advance([])


def test_an_error_of_a_sub_plan_is_the_plans_and_the_same_when_asked_again() -> None:
    class Picky:
        def plan(self, request: PlanRequest) -> Plan:
            yield Start("one", self.one())
            yield Join("one")
            return Finish(usage=Usage(), finish_reasons=())

        def one(self) -> SubPlan:
            heard = yield Walk("listen")
            raise ClientError(f"too much noise: {heard.fact('noise')}")

    journey = PlanRun(Picky(), REQUEST)
    for _ in range(2):
        with pytest.raises(ClientError, match="too much noise: 7"):
            journey.advance([(0, result(noise=7))])


def test_a_result_of_a_step_that_is_not_at_hand_is_an_error() -> None:
    with pytest.raises(BugError, match=r"a result of step 3 .* the pending steps are \[0\]"):
        PlanRun(Duet(), REQUEST).advance([(3, result())])
