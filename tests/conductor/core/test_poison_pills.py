"""Who killed the worker: requests that are held, resumed alone, cleared by progress, or found out."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from conductor.core.lifecycle import Phase
from configs.placement import PlacedGroup
from shared.events import Failure, Inputs, NodeReady, RequestAdmitted, RequestFailed, RequestResumed
from shared.ids import Rank
from tests.conductor import speech
from tests.conductor.script import LIMITS, SUBJECTS, Script, deployment


def served(ranks: Iterable[int] = (0,), *, max_attempts: int = 2, **changes: Any) -> Script:
    """A leading conductor, and replicas of all nodes on these ranks, which are all there."""
    group = PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=tuple(map(Rank, ranks)))
    limits = msgspec.structs.replace(LIMITS, max_attempts=max_attempts)
    script = Script(serve=deployment(groups=(group,), limits=limits, **changes))
    script.open_epoch()
    for rank in ranks:
        script.join(f"w{rank}-a", rank)
    return script


def running(script: Script, *request_ids: str) -> list[str]:
    """Those of the requests that have an order out."""
    return [one for one in request_ids if script.request(one).phase is Phase.RUNNING]


def die(script: Script, rank: int = 0) -> None:
    """The rank's worker dies, and its supervisor starts it again."""
    script.lose(rank)
    script.join(f"w{rank}-{len(script.records)}", rank)


def test_what_died_together_is_resumed_one_by_one_the_last_sent_out_first() -> None:
    script = served()
    for request_id in "abc":
        script.submit(request_id)
    die(script)
    assert running(script, "a", "b", "c") == ["c"]
    resumed = script.last(RequestResumed, "c")
    assert (resumed.on_probation, resumed.alone_on, resumed.attempt) == (True, [0], 2)
    assert "alone on rank 0, because a worker died while it ran" in resumed.reason
    assert script.last(NodeReady, "c").on_probation
    script.progress(script.last(NodeReady, "c"))
    assert running(script, "a", "b", "c") == ["b", "c"]
    script.progress(script.last(NodeReady, "b"))
    assert running(script, "a", "b", "c") == ["a", "b", "c"]


def test_a_request_that_kills_its_worker_fails_alone_and_its_neighbours_go_on() -> None:
    script = served()
    for request_id in ("innocent", "bystander", "poison"):
        script.submit(request_id)
    die(script)
    assert running(script, "innocent", "bystander", "poison") == ["poison"]
    die(script)
    failure = script.last(RequestFailed, "poison").failure
    assert (failure.code, failure.status) == ("poison_request", 500)
    assert "2 times in a row" in failure.message
    assert "nothing else beside it" in failure.message
    # It is found out: what was suspected beside it runs as if nothing had been.
    assert running(script, "innocent", "bystander") == ["innocent", "bystander"]
    assert not script.last(RequestResumed, "innocent").on_probation
    for one in ("innocent", "bystander"):
        script.run_to_the_end(one)
        assert script.request(one).phase is Phase.FINISHED


def test_a_death_beside_the_proven_convicts_nobody_and_the_next_time_it_is_alone() -> None:
    script = served()
    script.submit("suspect")
    script.submit("later")
    die(script)
    script.progress(script.last(NodeReady, "later"))
    resumed = script.last(RequestResumed, "suspect")
    assert (resumed.closed, resumed.alone_on) == ([0], [])
    assert "with proven requests only" in resumed.reason
    die(script)
    assert script.last(RequestFailed, "suspect") is None
    # "later" was there when the worker died, too; whoever comes first, "suspect" waits for an empty rank.
    assert running(script, "suspect", "later") == ["later"]
    script.progress(script.last(NodeReady, "later"))
    assert running(script, "suspect", "later") == ["later"]
    script.run_to_the_end("later")
    assert script.last(RequestResumed, "suspect").alone_on == [0]
    die(script)
    assert script.last(RequestFailed, "suspect").failure.code == "poison_request"


def test_of_a_life_that_ended_under_a_suspect_that_was_alone_no_other_is_a_suspect() -> None:
    script = served((0, 1))
    script.submit("a")
    script.submit("b")
    script.run_to_the_end("b")
    script.lose(0)
    assert script.last(RequestResumed, "a").alone_on == [1]
    first = script.request("a").suspicion.dead_incarnations[0]
    script.lose(1)
    assert script.cluster.blamed[first] == "a"
    assert set(script.cluster.blamed.values()) == {"a"}


def test_a_step_that_is_done_is_no_proof_for_the_next_may_be_the_one_that_kills() -> None:
    script = served()
    script.submit("first")
    script.submit("second")
    die(script)
    assert running(script, "first", "second") == ["second"]
    script.complete(script.last(NodeReady, "second"))
    assert running(script, "first", "second") == ["second"]
    assert script.last(NodeReady, "second").on_probation
    script.progress(script.last(NodeReady, "second"))
    assert running(script, "first", "second") == ["first", "second"]


def test_nothing_begins_beside_a_suspect_nor_before_it() -> None:
    script = served()
    script.submit("suspect")
    script.lose(0)
    script.submit("new")
    script.join("w0-b")
    assert running(script, "suspect", "new") == ["suspect"]
    script.progress(script.last(NodeReady, "suspect"))
    assert running(script, "suspect", "new") == ["suspect", "new"]


def test_a_step_that_is_done_begins_the_count_of_tries_again() -> None:
    script = served(max_attempts=2)
    script.submit()
    die(script)
    assert script.request().suspicion.tries == 2
    script.complete(script.last(NodeReady))
    assert script.request().suspicion.tries == 1
    die(script)
    assert script.request().phase is Phase.RUNNING


def test_a_tensor_that_is_gone_and_then_the_end_of_its_owner_are_one_try() -> None:
    script = served(max_attempts=2)
    script.submit()
    script.complete(script.last(NodeReady))
    ready = script.last(NodeReady)
    gone = Failure(code="tensor_gone", message="its owner does not answer")
    script.fail(ready, gone, gone="r1/1/0/prepare/prepare/x", gone_rank=0, gone_life=ready.incarnation)
    assert script.request().suspicion.tries == 2
    die(script)
    assert script.last(RequestFailed) is None
    die(script)
    assert script.last(RequestFailed).failure.code == "poison_request"


def test_a_step_before_the_one_that_was_under_way_clears_nothing() -> None:
    script = served()
    script.submit()
    script.complete(script.last(NodeReady))  # prepare
    required = script.last(NodeReady).index
    die(script)
    ready = script.last(NodeReady)
    assert (ready.index, ready.on_probation) == (required, True)
    script.progress(ready, index=required - 1)
    assert script.request().suspicion.dead_incarnations


def test_progress_begins_the_count_again_so_a_long_answer_outlives_any_number_of_accidents() -> None:
    script = served(max_attempts=2)
    script.submit()
    script.complete(script.last(NodeReady))
    for _ in range(5):
        die(script)
        script.progress(script.last(NodeReady))
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED
    assert script.request().attempt == 6


def test_progress_of_an_attempt_that_is_over_changes_nothing() -> None:
    script = served(max_attempts=3)
    script.submit()
    die(script)
    old = script.last(NodeReady)
    die(script)
    script.progress(old)
    assert script.request().suspicion.tries == 3


def test_who_dies_before_its_order_was_stored_did_not_die_of_it() -> None:
    script = served()
    script.lead = False
    script.submit()
    admission = script.cluster.schedule(script.deployment)
    script.publish(admission)
    script.settle()  # the order is decided, and nobody has stored it
    script.lose(0)
    script.lead = True
    script.publish(script.cluster.outstanding())
    script.join("w0-b")
    assert script.request().attempt == 2
    assert script.request().suspicion.dead_incarnations == {}


def test_an_order_that_was_stored_behind_what_a_life_had_read_did_not_kill_it() -> None:
    script = served()
    script.submit("before")
    read = len(script.records)
    script.submit("after")
    script.lose(0, read_seq=read)
    assert set(script.request("before").suspicion.dead_incarnations) == {0}
    assert script.request("after").suspicion.dead_incarnations == {}
    script.join("w0-b")
    assert running(script, "before", "after") == ["before"]


def test_a_worker_that_dies_before_it_began_did_not_die_of_it() -> None:
    """A worker whose lives end as they begin, out of memory say, costs no request its tries."""
    script = served()
    script.submit()
    script.begins = False
    for _ in range(4):
        die(script)
    assert script.request().phase is Phase.RUNNING
    assert script.request().suspicion.tries == 2
    script.begins = True
    die(script)  # the order before did not begin either
    assert script.request().suspicion.tries == 2
    die(script)
    assert script.last(RequestFailed).failure.code == "poison_request"


def test_who_dies_before_it_began_a_step_that_comes_before_the_suspect_one_did_not_die_of_it() -> None:
    """A rank may be dead already, by another whose time ran out, when a suspect is to begin there alone."""
    script = Script(serve=speech.deployment("one"), graph_of=speech.graph_of)
    script.open_epoch()
    script.join("w0-a")
    script.submit(inputs=Inputs(text="solo"))
    script.say(SUBJECTS.done(0, "r1"), speech.part(script.last(NodeReady)))
    assert script.last(NodeReady).index == 1
    script.begins = False
    for attempt in range(2, 6):
        die(script)
        again = script.last(NodeReady)
        assert (again.index, again.attempt, again.on_probation) == (0, attempt, True)  # its tensor is gone
        assert script.last(RequestResumed).alone_on == [0]
    assert script.request().phase is Phase.RUNNING
    assert script.request().suspicion.tries == 2


def test_who_dies_behind_its_own_part_did_not_die_of_the_rest() -> None:
    script = Script(serve=speech.deployment("three"), graph_of=speech.graph_of)
    script.open_epoch()
    for rank in range(3):
        script.join(f"w{rank}-a", rank)
    script.submit(inputs=Inputs(text="solo"))
    script.say(SUBJECTS.done(0, "r1"), speech.part(script.last(NodeReady)))
    first, second = script.events(NodeReady, "r1")[-2:]
    assert {first.rank, second.rank} == {0, 1}
    done = first if first.rank == 0 else second
    script.say(SUBJECTS.done(done.rank, "r1"), speech.part(done))
    script.lose(done.rank)
    assert script.request().phase is Phase.HELD
    assert script.request().suspicion.dead_incarnations == {}


def test_who_leaves_in_order_costs_no_try() -> None:
    script = served(max_attempts=1)
    script.submit()
    for life in "bcd":
        script.leave(0)
        script.join(f"w0-{life}")
    assert not script.last(RequestResumed).on_probation
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_with_one_try_whoever_was_there_fails_and_is_not_called_poison() -> None:
    script = served(max_attempts=1)
    script.submit("r1")
    script.submit("r2")
    die(script)
    assert {script.last(RequestFailed, one).failure.code for one in ("r1", "r2")} == {"worker_lost"}


def test_without_suspects_the_request_goes_on_at_a_replica_before_its_rank_is_back() -> None:
    script = served((0, 1))
    script.submit()
    assert script.request().placement == {"prepare": 0, "llm": 0}
    script.leave(0)
    assert script.request().placement == {"prepare": 1, "llm": 1}
    assert script.last(NodeReady).rank == 1
    assert "least loaded" in script.last(RequestResumed).reason
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_with_a_busy_replica_a_suspect_goes_on_there_at_once_and_so_do_newcomers() -> None:
    script = served((0, 1))
    for request_id in ("suspect", "busy", "other"):
        script.submit(request_id)
    assert [script.request(one).placement["llm"] for one in ("suspect", "busy", "other")] == [0, 1, 0]
    script.lose(0)
    script.submit("new")
    assert running(script, "suspect", "busy", "other", "new") == ["busy", "other", "new"]
    resumed = script.last(RequestResumed, "other")
    assert (resumed.on_probation, resumed.closed, resumed.alone_on) == (True, [], [])
    assert "as the only suspect on rank 1" in resumed.reason
    script.progress(script.last(NodeReady, "other"))
    assert running(script, "suspect") == ["suspect"]


def test_a_suspect_goes_to_an_empty_replica_before_a_busy_one() -> None:
    script = served((0, 1, 2))
    for request_id in ("suspect", "busy"):
        script.submit(request_id)
    script.lose(0)
    assert script.last(RequestResumed, "suspect").alone_on == [2]
    script.submit("new")
    assert script.request("new").placement["llm"] == 1


def test_after_a_death_beside_others_a_suspect_waits_for_an_empty_rank_which_is_made() -> None:
    script = served((0, 1, 2))
    for request_id in ("suspect", "one", "two"):
        script.submit(request_id)
    script.lose(0)
    assert script.request("suspect").placement["llm"] in {1, 2}
    with_it = script.request("suspect").placement["llm"]
    script.lose(with_it)
    (left,) = {1, 2} - {with_it}
    assert script.request("suspect").suspicion.in_doubt
    assert script.request("suspect").phase is Phase.HELD
    script.join("w0-b", 0)
    assert script.last(RequestResumed, "suspect").alone_on == [0]
    script.submit("newer")
    assert script.request("newer").placement["llm"] == left


def test_a_death_in_company_says_nothing_of_a_suspect() -> None:
    """A suspect of rank 0's death shares rank 2 with others: rank 2's death may be theirs."""
    groups = (
        PlacedGroup(nodes=("prepare",), walks=None, ranks=(Rank(2),)),
        PlacedGroup(nodes=("llm",), walks=None, ranks=(Rank(0), Rank(1))),
    )
    script = Script(serve=deployment(groups=groups, limits=msgspec.structs.replace(LIMITS, max_attempts=2)))
    script.open_epoch()
    for rank in range(3):
        script.join(f"w{rank}-a", rank)
    script.submit("suspect")
    script.complete(script.last(NodeReady, "suspect"))
    die(script, 0)
    assert script.last(RequestResumed, "suspect").alone_on == [1]
    script.submit("other")
    assert script.last(NodeReady, "other").rank == 2
    die(script, 2)
    assert script.request("suspect").suspicion.tries == 2
    assert script.request("other").phase is not Phase.FAILED
    assert script.request("suspect").phase is not Phase.FAILED


def test_the_places_of_held_requests_are_not_given_away() -> None:
    script = served(max_concurrent_requests=1)
    script.submit("first")
    script.submit("second")
    script.lose(0)
    script.join("w0-b")
    assert script.last(RequestAdmitted, "second") is None
    script.run_to_the_end("first")
    assert script.last(RequestAdmitted, "second") is not None


@pytest.mark.parametrize("poisons", [1, 2, 3])
def test_however_many_poisons_there_are_no_innocent_fails(poisons: int) -> None:
    """Each poison kills its worker whenever it runs; the innocent come to their ends."""
    script = served()
    requests = [f"{'poison' if n < poisons else 'good'}-{n}" for n in (3, 0, 4, 1, 5, 2)]
    for request_id in requests:
        script.submit(request_id)
    for _ in range(100):
        out = running(script, *requests)
        if not out:
            break
        if any(one.startswith("poison") for one in out):
            die(script)
        else:
            script.complete(script.last(NodeReady, out[0]))
    phases = {one: script.request(one).phase for one in requests}
    assert {one for one, phase in phases.items() if phase is Phase.FAILED} == {
        one for one in requests if one.startswith("poison")
    }
    assert {one for one, phase in phases.items() if phase is Phase.FINISHED} == {
        one for one in requests if one.startswith("good")
    }
