"""Who is let in first, on which replica, and who is turned away: each policy has its effect."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from conductor.core import queue
from conductor.core.affinity import Affinity, pieces
from conductor.core.lifecycle import Phase
from configs.placement import PlacedGroup
from shared.events import Inputs, NodeReady, Params, RequestAdmitted, RequestRejected
from shared.ids import Rank
from tests.conductor.script import LIMITS, Script, deployment


def served(ranks: Iterable[int] = (0,), **changes: Any) -> Script:
    """A leading conductor, and replicas of all nodes on these ranks, which are all there."""
    group = PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=tuple(map(Rank, ranks)))
    script = Script(serve=deployment(groups=(group,), **changes))
    script.open_epoch()
    for rank in ranks:
        script.join(f"w{rank}-a", rank)
    return script


def rank_of(script: Script, request_id: str) -> int:
    return int(script.request(request_id).placement["llm"])


def admitted(script: Script) -> list[str]:
    """Who was let in, in order."""
    return [str(event.request_id) for event in script.events(RequestAdmitted)]


# ---- who is first --------------------------------------------------------------------------------


def test_who_waits_is_let_in_by_priority_then_deadline_then_order() -> None:
    script = served(max_concurrent_requests=1)
    script.submit("now")
    script.submit("plain")
    script.submit("late", timeout_s=60)
    script.submit("soon", timeout_s=1)
    script.submit("urgent", priority=2)
    script.submit("whenever", priority=-1)
    for _ in range(6):
        script.run_to_the_end(admitted(script)[-1])
    assert admitted(script) == ["now", "urgent", "soon", "late", "plain", "whenever"]


def test_tenants_take_turns_whoever_asks_for_more() -> None:
    script = served(max_concurrent_requests=1)
    for number in range(4):
        script.submit(f"much-{number}", tenant="much")
    for number in range(2):
        script.submit(f"little-{number}", tenant="little")
    for _ in range(6):
        script.run_to_the_end(admitted(script)[-1])
    assert admitted(script) == ["much-0", "much-1", "little-0", "much-2", "little-1", "much-3"]


def test_nobody_saves_up_turns_by_staying_away() -> None:
    served_so_far = queue.normalized_admission_counts(Counter({"busy": 40}), {"busy", "new"})
    assert served_so_far == {"busy": 40, "new": 40}
    assert queue.normalized_admission_counts(served_so_far, {"new"}) == {"new": 40}


def test_of_free_places_each_tenant_gets_as_many() -> None:
    script = served(max_concurrent_requests=4)
    script.lead = False
    for number in range(6):
        script.submit(f"a-{number}", tenant="a")
    for number in range(6):
        script.submit(f"b-{number}", tenant="b")
    script.publish(script.cluster.schedule(script.deployment))
    script.settle()
    assert Counter(name[0] for name in admitted(script)) == {"a": 2, "b": 2}


def test_the_rank_is_told_what_its_engine_needs_to_know() -> None:
    script = served()
    seq = script.submit(priority=3, tenant="acme", timeout_s=2)
    ready = script.last(NodeReady)
    assert (ready.priority, ready.tenant, ready.deadline_ns) == (3, "acme", seq * 1_000_000 + 2 * 10**9)


# ---- which replica -------------------------------------------------------------------------------


def test_fsfs_gives_the_one_with_the_fewest() -> None:
    script = served((0, 1, 2))
    for name in "abcd":
        script.submit(name)
    assert [rank_of(script, name) for name in "abcd"] == [0, 1, 2, 0]
    script.run_to_the_end("b")
    script.submit("e")
    assert rank_of(script, "e") == 1


def test_rr_gives_one_after_the_other_whatever_they_have_to_do() -> None:
    script = served((0, 1, 2), replicas="rr")
    for name in "abcd":
        script.submit(name)
        script.run_to_the_end(name)
    assert [rank_of(script, name) for name in "abcd"] == [0, 1, 2, 0]


def test_random_is_what_the_requests_id_says_and_all_ranks_get_some() -> None:
    def ranks() -> list[int]:
        script = served((0, 1, 2), replicas="random", max_concurrent_requests=100)
        names = [f"r{number}" for number in range(60)]
        for name in names:
            script.submit(name)
        return [rank_of(script, name) for name in names]

    assert ranks() == ranks()
    assert min(Counter(ranks()).values()) > 8


def test_cache_aware_goes_where_the_beginning_was_before() -> None:
    script = served((0, 1), replicas="cache_aware", max_concurrent_requests=100)
    long = {name: Inputs(text=f"{name} " * 300) for name in ("fox", "hound")}
    script.submit("a", inputs=long["fox"])
    script.submit("b", inputs=long["hound"])
    assert [rank_of(script, name) for name in "ab"] == [0, 1]
    for number in range(4):
        longer = Inputs(text=f"{long['hound'].text} and {number}")
        script.submit(f"c{number}", inputs=longer)
        assert rank_of(script, f"c{number}") == 1
    assert "pieces of the prompt" in script.last(RequestAdmitted, "c0").reason
    script.submit("d", inputs=long["fox"])
    assert rank_of(script, "d") == 0


def test_what_a_rank_had_is_gone_with_its_life() -> None:
    script = served((0, 1), replicas="cache_aware")
    text = Inputs(text="a fox " * 200)
    script.submit("a", inputs=text)
    rank = rank_of(script, "a")
    script.run_to_the_end("a")
    script.join("again", rank)
    script.submit("b", inputs=text)
    assert "no rank has its prompt prefix cached" in script.last(RequestAdmitted, "b").reason


def test_a_replica_that_has_as_many_as_it_may_is_passed_over() -> None:
    script = served((0, 1), max_per_replica=1, max_concurrent_requests=8)
    for name in "abc":
        script.submit(name)
    assert [script.request(name).phase for name in "abc"] == [Phase.RUNNING, Phase.RUNNING, Phase.WAITING]
    script.run_to_the_end("b")
    assert rank_of(script, "c") == 1


def test_beginnings_are_named_with_all_that_is_before_them() -> None:
    one, other = Inputs(text="x" * 300 + "same" * 100), Inputs(text="y" * 300 + "same" * 100)
    assert not set(pieces(one)) & set(pieces(other))
    assert pieces(Inputs(text="x" * 700))[:2] == pieces(Inputs(text="x" * 900))[:2]
    assert pieces(Inputs(messages=[{"role": "user", "content": "x"}])) != pieces(Inputs(text="x"))


def test_what_is_remembered_of_a_rank_is_bounded_and_beginnings_outlive_ends() -> None:
    affinity = Affinity()
    for number in range(40):
        affinity.note(0, [bytes([number]) + place.to_bytes(2) for place in range(1000)])
    assert len(affinity.prefixes[0]) == 16_384
    newest = [bytes([39]) + place.to_bytes(2) for place in range(1000)]
    assert affinity.has(0, newest) == 1000
    oldest_there = [bytes([23]) + place.to_bytes(2) for place in range(1000)]
    assert 0 < affinity.has(0, oldest_there) < 1000


# ---- who is turned away, and who gets less ---------------------------------------------------------


def test_more_than_may_wait_are_turned_away_with_429() -> None:
    script = served(max_concurrent_requests=1, max_waiting=2)
    for name in "abcd":
        script.submit(name)
    refusal = script.last(RequestRejected, "d").failure
    assert (refusal.code, refusal.status) == ("queue_full", 429)
    assert [script.request(name).phase for name in "abc"] == [Phase.RUNNING, Phase.WAITING, Phase.WAITING]
    for _ in range(3):
        script.run_to_the_end(admitted(script)[-1])
    assert admitted(script) == ["a", "b", "c"]


def test_a_rejection_that_is_stored_behind_a_cancel_is_the_end_all_the_same() -> None:
    """Who reads the log takes its first end: so does the conductor, whatever it decided meanwhile."""
    script = served(max_concurrent_requests=1, max_waiting=0)
    script.submit("a")
    script.lead = False
    script.submit("b")
    (rejection,) = script.cluster.schedule(script.deployment)
    script.cancel("b")
    assert [type(one).__name__ for one in script.cluster.outstanding()] == ["RequestCancelled"]
    (cancelled,) = script.cluster.outstanding()
    script.publish([rejection, cancelled])
    script.settle()
    assert script.request("b").phase is Phase.REJECTED
    assert script.cluster.outstanding() == []
    assert all(folded.divergence is None for folded in script.folded)


def test_with_no_line_only_who_finds_a_place_is_served() -> None:
    script = served(max_concurrent_requests=1, max_waiting=0)
    script.submit("a")
    script.submit("b")
    assert script.last(RequestAdmitted, "a") is not None
    assert script.last(RequestRejected, "b").failure.code == "queue_full"


@pytest.mark.parametrize(("asked", "expected"), [(10, 8), (1, 1), (None, 12)])
def test_while_there_is_much_to_do_answers_are_shorter(asked: int | None, expected: int) -> None:
    script = served(max_concurrent_requests=4, shorten_above=0.25, shorten_to=0.8, limits=LIMITS)
    for name in "abc":
        script.submit(name, params=Params(max_tokens=asked))
        script.complete(script.last(NodeReady, name))
    budgets = [script.last(NodeReady, name).walks[-1].args["max_tokens"] for name in "abc"]
    whole = asked if asked is not None else LIMITS.default_max_tokens
    assert budgets == [whole, whole, expected]


@pytest.mark.slow
def test_a_long_line_is_let_in_each_once_the_urgent_first() -> None:
    script = served(max_concurrent_requests=2)
    for number in range(60):
        script.submit(f"r{number}", tenant=f"t{number % 7}", priority=number % 3)
    for _ in range(60):
        script.run_to_the_end(admitted(script)[-1])
        script.run_to_the_end(admitted(script)[-2])
    order = admitted(script)
    assert len(set(order)) == 60
    assert all(int(name[1:]) % 3 == 2 for name in order[2:20])


def test_limits_say_what_share_was_given() -> None:
    script = served(max_concurrent_requests=2, shorten_above=0.0, shorten_to=0.5)
    script.submit("a")
    script.submit("b")
    shares = [event.limits.max_tokens_share for event in script.events(RequestAdmitted)]
    assert shares == [1.0, 0.5]
    assert msgspec.structs.asdict(LIMITS)["max_tokens_share"] == 1.0
