"""Requests on many ranks: steps at the same time, parts merged, lives, tensors that are gone."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from conductor.core.lifecycle import Phase
from configs.placement import PlacedGroup
from shared.errors import BugError, ClientError
from shared.events import (
    Failure,
    Inputs,
    NodeReady,
    OutputFence,
    OutputTotals,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    WalkResult,
    WalkStop,
)
from shared.plans import Chain, Plan, PlanRequest, Start, Step, SubPlan, Walk
from shared.transcript import combined
from tests.conductor import speech
from tests.conductor.script import LIMITS, Script
from tests.conductor.speech import deployment, handle_of, key_of, part

GONE = Failure(code="tensor_gone", message="its owner is dead")


def begun(
    kind: str = "duet",
    layout: str | tuple[PlacedGroup, ...] = "three",
    *,
    lead: bool = True,
    **changes: Any,
) -> Script:
    """A request of this kind, submitted where all ranks are there; admitted, but for `lead=False`."""
    script = Script(serve=deployment(layout, **changes), graph_of=speech.graph_of)
    script.open_epoch()
    for rank in sorted({rank for group in script.deployment.groups for rank in group.ranks}):
        script.join(f"w{rank}-a", rank)
    script.lead = lead
    script.submit(inputs=Inputs(text=kind))
    return script


def orders(script: Script, attempt: int | None = None) -> list[NodeReady]:
    """The orders of an attempt, the present one by default."""
    attempt = script.request().attempt if attempt is None else attempt
    return [order for order in script.events(NodeReady, "r1") if order.attempt == attempt]


def order_of(script: Script, walk: str, rank: int | None = None) -> NodeReady:
    """The last order that has this walk, for this rank or whichever."""
    having = [
        order
        for order in script.events(NodeReady, "r1")
        if walk in {call.name for call in order.walks} and rank in (None, order.rank)
    ]
    assert isinstance(having[-1], NodeReady)
    return having[-1]


def done(script: Script, *walks: str, **changes: Any) -> None:
    """All ranks of the steps with these walks report, in order of ranks."""
    for walk in walks:
        last = order_of(script, walk)
        for order in orders(script):
            if order.index == last.index:
                script.say(f"ds.done.{order.rank}.r1", msgspec.structs.replace(part(order), **changes))


def at_hand(script: Script) -> dict[int, dict[int, int]]:
    return {step.index: step.incarnations for step in script.request().running}


# ---- steps and their ranks -----------------------------------------------------------------------


def test_a_request_on_three_ranks_with_three_partitions_comes_to_its_end() -> None:
    script = begun("trio")
    done(script, "prepare", "render", "decode", "caption", "go_on", "master", "sign")
    finished = script.last(RequestFinished)
    assert finished.usage.completion_tokens == speech.TOKENS
    assert script.request().phase is Phase.FINISHED
    assert script.cluster.outstanding() == []


def test_each_rank_of_a_step_is_told_all_of_it_and_the_lives_of_all_ranks() -> None:
    script = begun("solo")
    done(script, "prepare")
    prefill, decode = orders(script)[1:]
    assert (prefill.rank, decode.rank) == (0, 1)
    same = {"rank": 0, "incarnation": 0, "id": "", "number": 0}
    assert msgspec.structs.replace(prefill, **same) == msgspec.structs.replace(decode, **same)
    assert [walk.name for walk in prefill.walks] == ["prefill", "decode"]
    assert prefill.lives == {rank: script.cluster.world.incarnation(rank) for rank in (0, 1, 2)}
    assert prefill.incarnation == prefill.lives[0]
    assert prefill.placement == {"prepare": 0, "captioner": 0, "talker": 0, "vocoder": 2}
    assert prefill.walk_placement == {"decode": {"talker": 1}, "go_on": {"talker": 1}}


def test_a_request_on_one_rank_is_ordered_without_a_word_about_ranks() -> None:
    script = begun(layout="one")
    done(script, "prepare")
    assert {order.rank for order in orders(script)} == {0}
    assert all(order.lives == {} and order.walk_placement == {} for order in orders(script))


def test_steps_of_several_partitions_are_out_at_the_same_time() -> None:
    script = begun("trio")
    done(script, "prepare")
    told = [(order.partition, order.index, order.rank) for order in orders(script)[1:]]
    assert told == [("voice", 1, 2), ("captions", 2, 0), ("", 3, 0), ("", 3, 1)]
    assert order_of(script, "render").reason == "voice's step 1 is render"


def test_the_streams_that_end_with_a_step_are_in_its_order() -> None:
    script = begun("trio")
    done(script, "prepare", "decode")
    assert [(order.index, order.ends) for order in orders(script)][-2:] == [(3, []), (4, ["codes", "words"])]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Walk("prepare", ends=("code",)), "the plan ends the streams ['code']; there are ['codes', 'words']"),
        (Chain(Walk("prepare"), Walk("sleep")), "the plan asks for the walks ['sleep']; there are "),
    ],
)
def test_a_plan_that_names_what_is_not_there_fails_its_request(step: Step, message: str) -> None:
    def plan(request: PlanRequest) -> Plan:
        yield step
        raise AssertionError("never reached")

    graph = replace(speech.GRAPH, plan=plan)
    script = Script(serve=deployment("one"), graph_of=lambda _: graph)
    script.open_epoch()
    script.join()
    script.submit()
    failure = script.last(RequestFailed).failure
    assert (failure.code, failure.message.startswith(message)) == (BugError.code, True)


def test_a_sub_plans_error_fails_the_request() -> None:
    def plan(request: PlanRequest) -> Plan:
        yield Start("picky", picky())
        yield Walk("prepare")
        raise AssertionError("never reached")

    def picky() -> SubPlan:
        yield Walk("prepare")
        raise ClientError("too loud", code="noise")

    graph = replace(speech.GRAPH, plan=plan)
    script = Script(serve=deployment("one"), graph_of=lambda _: graph)
    script.open_epoch()
    script.join()
    script.submit()
    script.say("ds.done.0.r1", part(orders(script)[0]))
    assert script.last(RequestFailed).failure == Failure(code="noise", message="too loud", status=400)


def test_a_step_is_done_when_all_its_ranks_are_and_their_parts_are_one_result() -> None:
    script = begun("solo")
    done(script, "prepare")
    decode = order_of(script, "decode", rank=1)
    script.say("ds.done.1.r1", part(decode))
    assert at_hand(script) == {1: {0: decode.lives[0], 1: decode.lives[1]}}
    script.say("ds.done.0.r1", part(order_of(script, "prefill", rank=0)))
    _, (index, result) = script.request().results
    assert index == 1
    assert (result.fact("cached"), result.fact("completion_tokens")) == (0, speech.TOKENS)
    assert order_of(script, "sign").walks[0].inputs == {
        "state": handle_of(decode, "decode", "talker", "state")
    }


def test_a_second_report_of_a_part_changes_nothing() -> None:
    script = begun("solo")
    done(script, "prepare")
    first = part(order_of(script, "prefill", rank=0))
    script.say("ds.done.0.r1", first)
    before = script.request()
    script.say("ds.done.0.r1", first)
    script.say("ds.done.2.r1", msgspec.structs.replace(first, rank=2, incarnation=None))
    assert script.request() == before


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            [WalkResult(name="prefill"), WalkResult(name="decode", facts={"completion_tokens": 9})],
            "'completion",
        ),
        ([WalkResult(name="prefill")], "expected the same"),
    ],
)
def test_parts_that_contradict_one_another_fail_the_request(results: list[WalkResult], message: str) -> None:
    script = begun("solo")
    done(script, "prepare")
    script.say("ds.done.0.r1", part(order_of(script, "prefill", rank=0), results=results))
    script.say("ds.done.1.r1", part(order_of(script, "decode", rank=1)))
    failure = script.last(RequestFailed).failure
    assert (failure.code, failure.status) == (BugError.code, 500)
    assert message in failure.message


def test_the_output_is_that_of_all_tracks_as_reported_last() -> None:
    script = begun("duet")
    done(script, "prepare")
    text, sound = OutputTotals(chunks=2, digest="t"), OutputTotals(chunks=3, digest="s")
    nothing = OutputTotals(chunks=0, digest="nothing")
    done(script, "decode", "go_on", tracks={"talker": text})
    done(script, "render", tracks={"vocoder": sound, "talker": OutputTotals(chunks=1, digest="stale")})
    done(script, "master", "sign", output=nothing)
    assert script.last(RequestFinished).output == combined({"talker": text, "vocoder": sound})


def test_a_failed_part_fails_the_request() -> None:
    script = begun("duet")
    done(script, "prepare")
    script.fail(order_of(script, "render"), Failure(code="x", message="no sound"))
    assert script.last(RequestFailed).failure.message == "no sound"
    assert script.request().running == ()


def test_a_cancel_stops_every_rank_of_every_step_that_is_out() -> None:
    script = begun("duet")
    done(script, "prepare")
    script.cancel()
    stops = [(stop.index, stop.rank, stop.attempt) for stop in script.events(WalkStop)]
    assert stops == [(1, 2, 1), (2, 0, 1), (2, 1, 1)]
    assert script.last(RequestCancelled) is not None


# ---- lives ---------------------------------------------------------------------------------------


def test_no_step_is_sent_out_while_a_rank_of_the_request_is_away() -> None:
    script = begun("solo", lead=False)
    admission = script.cluster.schedule(script.deployment)
    script.lead = True
    script.leave(2)
    script.publish(admission)
    script.settle()
    assert (script.request().phase, orders(script)) == (Phase.HELD, [])
    script.join("w2-b", 2)
    assert [order.rank for order in orders(script)] == [0]
    assert script.request().attempt == 1
    assert script.last(OutputFence) is None


def test_a_rank_that_was_not_at_work_is_awaited_all_the_same() -> None:
    script = begun("solo")
    script.leave(2)
    assert script.request().phase is Phase.HELD
    script.join("w2-b", 2)
    assert [order.rank for order in orders(script)] == [0]
    assert script.request().attempt == 2
    assert script.request().suspicion.dead_incarnations == {}


def test_what_was_in_the_memory_of_a_life_is_made_again_at_once() -> None:
    script = begun("solo")
    done(script, "prepare")
    life = script.join("w0-b", 0)
    assert [(order.index, order.rank, order.lives[0]) for order in orders(script)] == [(0, 0, life)]
    done(script, "prepare", "decode", "sign")
    assert script.request().phase is Phase.FINISHED


def test_a_tensor_that_is_gone_with_a_life_costs_no_try() -> None:
    script = begun("solo", limits=msgspec.structs.replace(LIMITS, max_attempts=1))
    done(script, "prepare", "decode")
    sign = order_of(script, "sign")
    script.fail(sign, GONE, gone=sign.walks[0].inputs["state"].key, gone_rank=1, gone_life=1)
    assert script.last(RequestFailed) is None
    assert script.request().attempt == 2


@pytest.mark.parametrize("rank", [1, 2])
def test_a_new_life_of_any_rank_starts_the_step_again_on_all_of_its_ranks(rank: int) -> None:
    script = begun("solo")
    done(script, "prepare")
    script.say("ds.done.0.r1", part(order_of(script, "prefill", rank=0)))  # a part that is void now
    life = script.join(f"w{rank}-b", rank)
    assert [fence.attempt for fence in script.events(OutputFence)] == [2]
    assert [(order.index, order.rank, order.lives[rank]) for order in orders(script)] == [
        (1, 0, life),
        (1, 1, life),
    ]
    assert f"rank {rank} began a new life, " in script.last(OutputFence).reason
    assert script.last(OutputFence).reason.endswith(", before step 1 was done")
    done(script, "decode", "sign")
    assert script.request().phase is Phase.FINISHED


def test_with_partitions_a_new_life_goes_back_to_where_the_request_last_ran_alone() -> None:
    script = begun("trio")
    done(script, "prepare", "decode", "caption", "go_on")
    assert sorted(at_hand(script)) == [1]
    script.join("w1-b", 1)
    assert [index for index, _ in script.request().results] == [0]
    assert sorted(at_hand(script)) == [1, 2, 3]
    assert [(order.index, order.rank) for order in orders(script)] == [(1, 2), (2, 0), (3, 0), (3, 1)]
    done(script, "render", "decode", "caption", "go_on", "master", "sign")
    assert script.request().phase is Phase.FINISHED


def test_what_was_done_before_the_partitions_began_and_after_they_ended_is_kept() -> None:
    script = begun("duet")
    done(script, "prepare", "render", "decode", "go_on", "master")
    kept = script.request().results
    script.join("w2-b", 2)
    assert script.request().results == kept
    assert [(order.index, order.rank) for order in orders(script)] == [(5, 0)]


def test_partitions_that_had_come_somewhere_begin_again_with_a_new_life() -> None:
    script = begun("duet")
    done(script, "prepare")
    script.leave(2)  # with all of the stream it had heard
    for walk in ("render", "decode"):
        done(script, walk)  # of an attempt that is over
    assert script.request().phase is Phase.HELD
    script.join("w2-b", 2)
    assert script.request().attempt == 2
    assert sorted(at_hand(script)) == [1, 2]


def test_every_rank_is_told_that_the_old_attempt_is_over() -> None:
    script = begun("duet")
    done(script, "prepare")
    ids = key_of(orders(script)[0], "prepare", "prepare", "ids")
    script.fail(order_of(script, "prefill", rank=0), GONE, gone=ids)
    assert [(order.index, order.rank) for order in orders(script)] == [(0, 0)]
    assert [(stop.index, stop.rank, stop.attempt) for stop in script.events(WalkStop)] == [
        (1, 2, 1),
        (2, 0, 1),
        (2, 1, 1),
    ]


def test_the_living_ranks_of_an_interrupted_step_are_told_at_once() -> None:
    script = begun("solo")
    done(script, "prepare")
    script.leave(1)
    assert [(stop.rank, stop.attempt) for stop in script.events(WalkStop)] == [(0, 1)]
    script.join("w1-b", 1)
    assert script.request().attempt == 2
    done(script, "decode", "sign")
    assert script.request().phase is Phase.FINISHED


@pytest.mark.parametrize("rank", [1, 2])
def test_a_request_is_not_tried_for_ever_on_many_ranks_either(rank: int) -> None:
    script = begun("duet", limits=msgspec.structs.replace(LIMITS, max_attempts=3))
    done(script, "prepare")
    for life in "bcd":
        script.join(f"w{rank}-{life}", rank)
    assert script.last(RequestFailed).failure.code == "poison_request"
    assert script.request().attempt == 3


# ---- tensors that are gone -----------------------------------------------------------------------


def test_a_tensor_that_is_gone_is_made_again_by_the_step_that_made_it() -> None:
    script = begun("solo")
    done(script, "prepare", "decode")
    sign = order_of(script, "sign")
    script.fail(sign, GONE, gone=sign.walks[0].inputs["state"].key)
    assert script.last(OutputFence).attempt == 2
    assert [index for index, _ in script.request().results] == [0]
    assert [(order.index, order.rank) for order in orders(script)] == [(1, 0), (1, 1)]
    done(script, "decode", "sign")
    assert script.request().phase is Phase.FINISHED
    assert order_of(script, "sign").walks[0].inputs["state"].key == "r1/2/1/decode/talker/state"


def test_one_that_is_made_within_a_step_starts_that_step_again() -> None:
    script = begun("solo")
    done(script, "prepare")
    decode = order_of(script, "decode", rank=1)
    script.fail(decode, GONE, gone=key_of(decode, "prefill", "talker", "kv"))
    assert [index for index, _ in script.request().results] == [0]
    assert [(order.index, order.rank) for order in orders(script)] == [(1, 0), (1, 1)]


def test_one_that_is_made_in_a_partition_starts_all_partitions_again() -> None:
    script = begun("trio")
    done(script, "prepare", "caption", "render", "decode")
    master = order_of(script, "master")
    script.fail(master, GONE, gone=master.walks[0].inputs["sound"].key)
    assert [index for index, _ in script.request().results] == [0]
    assert sorted(at_hand(script)) == [1, 2, 3]


def test_one_that_was_made_before_a_join_is_made_again_with_what_ran_beside_it() -> None:
    script = begun("duet")
    done(script, "prepare", "render", "decode", "go_on", "master")
    sign = order_of(script, "sign")
    script.fail(sign, GONE, gone=sign.walks[0].inputs["state"].key)
    assert sorted(at_hand(script)) == [1, 2]


def test_a_tensor_cannot_be_gone_for_ever() -> None:
    script = begun("solo", limits=msgspec.structs.replace(LIMITS, max_attempts=2))
    done(script, "prepare")
    for _ in range(2):
        decode = order_of(script, "decode", rank=1)
        script.fail(decode, GONE, gone=key_of(decode, "prefill", "talker", "kv"))
    failure = script.last(RequestFailed).failure
    assert failure.code == "tensor_gone"
    assert failure.message == "its owner is dead; this was try 2 of 2 without progress (max_attempts)"


def test_ranks_that_die_at_once_and_come_back_one_by_one_lose_no_request() -> None:
    script = begun("solo", limits=msgspec.structs.replace(LIMITS, max_attempts=2))
    done(script, "prepare")
    dead = script.cluster.world.incarnation(0)
    script.join("w1-b", 1)  # rank 0 is dead as well, and the log does not say so yet
    decode = order_of(script, "decode", rank=1)
    key = key_of(decode, "prefill", "talker", "kv")
    script.fail(decode, GONE, gone=key, gone_rank=0, gone_life=dead)
    assert script.last(RequestFailed) is None
    script.join("w0-b", 0)
    done(script, "prepare", "decode", "sign")
    assert script.request().phase is Phase.FINISHED


def test_a_rank_that_lives_and_loses_a_tensor_again_fails_the_request() -> None:
    script = begun("solo", limits=msgspec.structs.replace(LIMITS, max_attempts=2))
    done(script, "prepare")
    for _ in range(2):
        assert script.last(RequestFailed) is None
        decode = order_of(script, "decode", rank=1)
        key, life = key_of(decode, "prefill", "talker", "kv"), script.cluster.world.incarnation(0)
        script.fail(decode, GONE, gone=key, gone_rank=0, gone_life=life)
    assert script.last(RequestFailed).failure.code == "tensor_gone"


@pytest.mark.parametrize(
    "gone",
    [None, "", "r1", "r1/1", "r1/1/x/decode", "r2/1/0/prepare", "r1/1/7/sign/n/e", f"r1/1/{'9' * 5000}/w"],
)
def test_a_tensor_that_no_step_made_fails_the_request(gone: str | None) -> None:
    script = begun("solo")
    done(script, "prepare")
    script.fail(order_of(script, "decode", rank=1), GONE, gone=gone)
    assert script.last(RequestFailed).failure == GONE


def test_only_one_of_two_ranks_that_miss_a_tensor_starts_a_new_attempt() -> None:
    script = begun("solo")
    done(script, "prepare")
    first, second = order_of(script, "prefill", rank=0), order_of(script, "decode", rank=1)
    ids = first.walks[0].inputs["ids"].key
    script.fail(first, GONE, gone=ids)
    script.fail(second, GONE, gone=ids)
    assert script.request().attempt == 2


# ---- admission -----------------------------------------------------------------------------------


def test_nobody_is_admitted_before_every_group_has_a_rank() -> None:
    script = Script(serve=deployment("replicas"), graph_of=speech.graph_of)
    script.open_epoch()
    script.submit(inputs=Inputs(text="duet"))
    for rank in (0, 2):
        assert script.last(RequestAdmitted) is None
        script.join(f"w{rank}-a", rank)
    assert script.last(RequestAdmitted).placement["talker"] == 2  # its other replica is away


def test_of_replicas_the_least_loaded_is_given_and_why_is_recorded() -> None:
    groups = (
        speech.group("prepare captioner", 0),
        speech.group("talker", 1, 2),
        speech.group("vocoder", 3, 4),
    )
    script = begun(layout=groups)
    for name in ("r2", "r3"):
        script.submit(name, inputs=Inputs(text="duet"))
    given = [(one.placement["talker"], one.placement["vocoder"]) for one in script.events(RequestAdmitted)]
    assert given == [(1, 3), (2, 4), (1, 3)]
    script.cancel("r1")
    script.cancel("r3")
    script.submit("r4", inputs=Inputs(text="duet"))
    assert script.last(RequestAdmitted, "r4").placement["talker"] == 1
    assert script.last(RequestAdmitted, "r4").reason == (
        "talker on rank 1 of [1, 2]: least loaded, 0 open requests; "
        "vocoder on rank 3 of [3, 4]: least loaded, 0 open requests; concurrent request 2 of 8"
    )


def test_an_admission_on_its_way_counts_as_load() -> None:
    groups = (speech.group("prepare captioner vocoder", 0), speech.group("talker", 1, 2))
    script = begun(layout=groups)
    script.lead = False
    for name in ("r2", "r3"):
        script.submit(name, inputs=Inputs(text="duet"))
    on_their_way = script.cluster.schedule(script.deployment)
    script.submit("r4", inputs=Inputs(text="duet"))
    on_their_way += script.cluster.schedule(script.deployment)
    given = [one.placement["talker"] for one in on_their_way if isinstance(one, RequestAdmitted)]
    assert given == [2, 1, 2]


@pytest.mark.parametrize("decode", [(1,), (1, 0)])
def test_keys_and_values_do_not_move_where_they_need_not(decode: tuple[int, ...]) -> None:
    groups = (
        speech.group("prepare captioner vocoder", 0),
        speech.group("talker", 0, 1, walks="prefill"),
        speech.group("talker", *decode),
    )
    script = begun(layout=groups)
    script.submit("r2", inputs=Inputs(text="duet"))
    given = [one.placement["talker"] for one in script.events(RequestAdmitted)]
    assert given == [1, 1] if decode == (1,) else [0, 1]
    assert all(one.walk_placement == {} for one in script.events(RequestAdmitted))
    assert "the nodes run there in other walks" in script.last(RequestAdmitted).reason


def test_the_pool_of_the_rank_that_is_given_limits_a_request() -> None:
    groups = (speech.group("prepare captioner vocoder", 0), speech.group("talker", 1, 2))
    script = Script(serve=deployment(groups), graph_of=speech.graph_of)
    script.open_epoch()
    for rank, kv_tokens in ((0, 8), (1, 96), (2, 112)):
        script.join(f"w{rank}-a", rank, kv_tokens)
    for name in ("r1", "r2"):
        script.submit(name, inputs=Inputs(text="solo"))
    assert [one.limits.kv_tokens for one in script.events(RequestAdmitted)] == [96, 112]


def test_a_rank_that_a_request_is_not_placed_on_is_none_of_its_business() -> None:
    groups = (speech.group("prepare captioner vocoder", 0), speech.group("talker", 1, 2))
    script = begun(layout=groups)
    before = script.request()
    script.join("w2-b", 2)
    assert script.request() == before
