"""The conductor's fold, told as histories."""

from typing import get_args

import msgspec
import pytest

from conductor.core import retention, snapshot
from conductor.core.cluster import Cluster
from conductor.core.lifecycle import Phase
from conductor.core.replay import Replayer, Verdict
from models import registry
from shared.events import (
    AnyEvent,
    Failure,
    Inputs,
    NodeReady,
    OutputFence,
    Params,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestsRefused,
    WalkStop,
    WorkerJoined,
    encode,
)
from tests.conductor.script import LIMITS, SUBJECTS, Script, completion, deployment


@pytest.fixture
def script() -> Script:
    script = Script()
    script.open_epoch()
    script.join()
    return script


def test_every_kind_of_event_has_its_handler() -> None:
    assert set(Cluster.HANDLERS) == set(get_args(AnyEvent))


def test_what_gateways_refused_changes_nothing(script: Script) -> None:
    script.submit()
    before = snapshot.dump(script.cluster)
    seq, now_ns = script.cluster.seq, script.cluster.now_ns
    script.say(SUBJECTS.refused("g-1"), RequestsRefused(writer="g-1", since_ns=1, counts=[]))
    assert script.folded[-1].decisions == ()
    assert script.cluster.seq == seq + 1
    script.cluster.seq, script.cluster.now_ns = (
        seq,
        now_ns,
    )  # the position in the log, which each record moves
    assert snapshot.dump(script.cluster) == before


def test_a_request_walks_from_submission_to_its_end(script: Script) -> None:
    script.submit()
    script.run_to_the_end()
    assert script.kinds() == [
        "RequestSubmitted",
        "RequestAdmitted",
        "NodeReady",
        "WalkCompleted",
        "NodeReady",
        "WalkCompleted",
        "RequestFinished",
    ]
    finished = script.last(RequestFinished)
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (3, 4)
    assert finished.finish_reasons == ["length"]
    assert script.request().phase is Phase.FINISHED
    assert script.cluster.outstanding() == []


def test_an_order_carries_the_whole_decision(script: Script) -> None:
    script.submit(inputs=Inputs(text="hello"), params=Params(max_tokens=4, seed=7))
    ready = script.last(NodeReady)
    assert (ready.index, ready.attempt, ready.epoch, ready.incarnation) == (0, 1, 1, 2)
    assert ready.walks[0].args["inputs"]["text"] == "hello"
    assert ready.seed == 7
    script.complete(ready)
    chain = script.last(NodeReady)
    assert [walk.name for walk in chain.walks] == ["prefill", "decode"]
    assert chain.walks[0].inputs["token_ids"].shape == (3,)
    assert chain.walks[1].args["max_tokens"] == 4


def test_an_absent_seed_is_derived_from_the_id_and_recorded(script: Script) -> None:
    for request_id in ("a", "b", "c"):
        script.submit(request_id)
    seeds = [event.seed for event in script.events(RequestAdmitted)]
    assert len(set(seeds)) == 3
    assert all(seed >= 0 for seed in seeds)


def test_nothing_is_admitted_while_a_rank_is_away() -> None:
    script = Script()
    script.open_epoch()
    script.submit()
    assert script.kinds() == ["RequestSubmitted"]
    script.join()
    assert script.last(RequestAdmitted) is not None


def test_more_requests_than_places_wait_in_order() -> None:
    script = Script(serve=deployment(max_concurrent_requests=2))
    script.open_epoch()
    script.join()
    for number in range(4):
        script.submit(f"r{number}")
    assert [event.request_id for event in script.events(RequestAdmitted)] == ["r0", "r1"]
    script.run_to_the_end("r1")
    assert [event.request_id for event in script.events(RequestAdmitted)] == ["r0", "r1", "r2"]


def test_an_unknown_model_is_refused_with_404_though_every_place_is_taken() -> None:
    script = Script(serve=deployment(max_concurrent_requests=1))
    script.open_epoch()
    script.join()
    script.submit("r1")
    seq = script.submit("r2", model="gpt-9")
    rejected = script.last(RequestRejected, "r2")
    assert (rejected.failure.code, rejected.failure.status) == ("model_not_found", 404)
    assert rejected.submission_seq == seq
    assert script.request("r2").phase is Phase.REJECTED


def test_a_prompt_that_does_not_fit_fails_with_a_typed_400(script: Script) -> None:
    script.submit(params=Params(max_tokens=126))
    script.complete(script.last(NodeReady))
    failed = script.last(RequestFailed)
    assert (failed.failure.code, failed.failure.status) == ("context_length_exceeded", 400)
    assert "128" in failed.failure.message


def test_an_order_larger_than_the_log_takes_fails_its_request_with_a_typed_413() -> None:
    limits = msgspec.structs.replace(LIMITS, max_event_bytes=4096)
    script = Script(serve=deployment(limits=limits))
    script.open_epoch()
    script.join()
    script.submit("large", inputs=Inputs(text="x" * 3900))
    failed = script.last(RequestFailed, "large")
    assert failed is not None
    assert (failed.failure.code, failed.failure.status) == ("payload_too_large", 413)
    script.submit("small", inputs=Inputs(text="x" * 3000))
    script.run_to_the_end("small")
    assert script.request("small").phase is Phase.FINISHED
    assert max(len(record.data) for record in script.records) <= 4096


def test_without_max_tokens_the_default_is_cut_to_what_fits(script: Script) -> None:
    script.submit(params=Params())
    script.complete(script.last(NodeReady))
    assert script.last(NodeReady).walks[1].args["max_tokens"] == 16


def test_a_failed_walk_ends_its_request_with_the_workers_error(script: Script) -> None:
    script.submit()
    script.fail(script.last(NodeReady), Failure(code="bad_template", message="no template", status=400))
    assert script.last(RequestFailed).failure.code == "bad_template"


# ---- duplicates and late deliveries --------------------------------------------------------------


def test_the_same_id_twice_executes_once(script: Script) -> None:
    script.submit()
    script.submit()
    script.run_to_the_end()
    script.submit()
    assert len(script.events(RequestAdmitted)) == 1
    assert len(script.events(RequestRejected)) == 0


def test_what_the_log_forgot_after_its_end_is_not_answered_anew_under_its_id(script: Script) -> None:
    script.submit("r1")
    script.run_to_the_end("r1")
    ordinary = script.submit("r1")  # stored twice by its publisher: it has its answer
    seq = script.submit("r1", is_first=True)  # stored where nothing was of it any more

    [rejected] = script.events(RequestRejected)
    assert (rejected.failure.code, rejected.failure.status) == ("request_expired", 410)
    assert rejected.submission_seq == seq > ordinary
    assert script.request("r1").phase is Phase.FINISHED


@pytest.mark.parametrize("after_the_end", [False, True])
def test_the_same_id_with_another_body_is_a_conflict_and_harms_nobody(
    script: Script, after_the_end: bool
) -> None:
    script.submit()
    if after_the_end:
        script.run_to_the_end()
    seq = script.submit(inputs=Inputs(text="something else"))
    rejected = script.last(RequestRejected)
    assert (rejected.failure.code, rejected.submission_seq) == ("request_id_conflict", seq)
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_every_record_twice_changes_nothing(script: Script) -> None:
    script.submit()
    script.run_to_the_end()
    before = (script.request(), len(script.records))
    for record in list(script.records):
        script.say(record.subject, record.data)
    assert script.request() == before[0]
    assert len(script.records) == 2 * before[1]


def test_a_completion_of_an_older_attempt_changes_nothing(script: Script) -> None:
    script.submit()
    old = script.last(NodeReady)
    script.join("w0-b")
    state = script.request()
    script.complete(old)
    assert script.request() == state


# ---- cancel --------------------------------------------------------------------------------------


def test_cancel_of_a_running_request_stops_its_walk(script: Script) -> None:
    script.submit()
    ready = script.last(NodeReady)
    script.cancel()
    stop = script.last(WalkStop)
    assert (stop.rank, stop.attempt, stop.index) == (ready.rank, ready.attempt, ready.index)
    assert script.last(RequestCancelled).reason == "client left"
    script.complete(ready)
    assert script.last(RequestFinished) is None


def test_cancel_before_admission_wins_over_an_admission_behind_it() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.lead = False
    script.submit()
    admission = script.cluster.schedule(script.deployment)
    script.lead = True
    script.cancel()
    script.publish(admission)
    script.settle()
    assert script.kinds() == ["RequestSubmitted", "RequestCancel", "RequestCancelled", "RequestAdmitted"]
    assert script.request().phase is Phase.CANCELLED


def test_cancel_after_the_last_completion_is_too_late(script: Script) -> None:
    script.submit()
    script.run_to_the_end()
    script.cancel()
    assert script.last(RequestCancelled) is None
    assert script.request().phase is Phase.FINISHED


# ---- workers come and go -------------------------------------------------------------------------


def test_a_new_life_of_a_rank_starts_its_walks_again_behind_a_fence(script: Script) -> None:
    script.submit()
    script.complete(script.last(NodeReady))
    incarnation = script.join("w0-b")
    assert script.kinds()[-4:] == ["OutputFence", "RequestResumed", "NodeReady", "WalkBegun"]
    assert script.last(OutputFence).attempt == 2
    again = script.last(NodeReady)
    assert (again.attempt, again.index, again.incarnation) == (2, 1, incarnation)
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_a_second_copy_of_joined_is_no_second_life(script: Script) -> None:
    script.submit()
    script.join("w0-a")
    assert script.request().attempt == 1


def test_a_life_whose_beginning_the_log_forgot_is_known_by_what_it_says_again(script: Script) -> None:
    joined = script.events(WorkerJoined)[-1]
    again = msgspec.structs.replace(joined, incarnation=2)
    script.say(SUBJECTS.worker(0), again)
    assert script.cluster.world.incarnation(0) == 2

    later = Script()
    later.store("ds.walk.older", b"")  # whatever the log forgot first
    later.open_epoch(7)
    later.say(SUBJECTS.worker(0), again)
    later.submit()
    assert later.last(NodeReady).incarnation == 2


def test_when_a_rank_leaves_its_requests_are_held_until_it_joins_again(script: Script) -> None:
    script.submit()
    script.leave(0)
    script.complete(script.last(NodeReady))  # late: the attempt is over
    request = script.request()
    assert (request.phase, request.attempt, request.running) == (Phase.HELD, 2, ())
    assert script.kinds()[-2:] == ["OutputFence", "WalkCompleted"]
    script.join("w0-b")
    assert script.kinds()[-2:] == ["RequestResumed", "NodeReady"]
    assert script.last(NodeReady).attempt == 2
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_an_admission_names_the_lives_of_its_ranks_and_so_does_a_resumption(script: Script) -> None:
    script.submit()
    first = script.last(NodeReady)
    assert script.last(RequestAdmitted).lives == {"w0": first.incarnation}
    assert script.request().lives == {"w0": first.incarnation}
    again = script.join("w0-b")
    assert script.last(RequestResumed).lives == {"w0": again}
    assert script.last(NodeReady).incarnation == again


def test_a_request_admitted_to_a_life_that_is_over_is_held_and_resumed_with_the_next(script: Script) -> None:
    """Its rank joined again between the decision and its record: orders name the recorded life only."""
    script.lead = False
    script.submit()
    admission = script.cluster.schedule(script.deployment)
    again = script.join("w0-b")
    script.publish(admission)
    script.settle()
    assert script.request().phase is Phase.HELD
    assert script.last(NodeReady) is None
    script.lead = True
    script.publish(script.cluster.schedule(script.deployment))
    script.settle()
    assert script.last(RequestResumed).lives == {"w0": again}
    assert script.last(NodeReady).incarnation == again
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED
    assert replayed_verdict(script).matches


def replayed_verdict(script: Script) -> Verdict:
    return Replayer(registry.graph, SUBJECTS).run(script.records)["r1"]


def test_a_request_that_ends_while_it_is_held_is_not_resumed(script: Script) -> None:
    script.submit()
    script.leave(0)
    script.cancel()
    script.join("w0-b")
    assert script.last(RequestResumed) is None
    assert script.request().phase is Phase.CANCELLED


def test_a_request_is_resumed_once_though_its_resumption_is_slow_to_be_stored(script: Script) -> None:
    script.submit()
    script.leave(0)
    script.lead = False
    script.join("w0-b")
    decisions = script.cluster.schedule(script.deployment)
    assert [type(decision) for decision in decisions] == [RequestResumed]
    script.store("ds.walk.other", b"junk")
    script.settle()
    assert script.cluster.schedule(script.deployment) == []
    script.lead = True
    script.publish(decisions)
    script.settle()
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_a_new_leader_resumes_what_the_deposed_one_was_about_to(script: Script) -> None:
    script.submit()
    script.leave(0)
    script.lead = False
    script.join("w0-b")
    assert script.cluster.schedule(script.deployment)  # and dies with it
    script.lead = True
    script.open_epoch(2, "c2")
    assert script.last(RequestResumed).epoch == 2
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_a_life_declared_over_counts_though_its_worker_still_speaks(script: Script) -> None:
    script.submit()
    ready = script.last(NodeReady)
    script.lose(0)
    assert script.request().phase is Phase.HELD
    script.complete(ready)
    assert script.request().phase is Phase.HELD
    again = script.join("w0-b")
    assert script.last(NodeReady).incarnation == again


def test_the_end_of_a_life_that_is_over_already_changes_nothing(script: Script) -> None:
    script.submit()
    life = script.cluster.world.incarnation(0)
    script.join("w0-b")
    script.lose(0, life)
    assert script.request().phase is Phase.RUNNING
    assert script.request().attempt == 2


# ---- conductors come and go ----------------------------------------------------------------------


def test_a_successor_publishes_what_is_decided_but_not_recorded(script: Script) -> None:
    script.submit()
    script.lead = False  # it dies between deciding and publishing
    script.complete(script.last(NodeReady))
    successor = Script()
    successor.records = script.records
    successor.lead = False
    successor.settle()
    assert [d.id for d in successor.cluster.outstanding()] == ["r1.ready.1.1.0"]
    successor.lead = True
    successor.open_epoch(2, "c2")
    successor.publish(successor.cluster.outstanding())
    successor.settle()
    successor.run_to_the_end()
    assert successor.request().phase is Phase.FINISHED
    assert successor.last(RequestFinished).epoch == 2


def test_a_deposed_conductors_decision_is_void(script: Script) -> None:
    script.submit()
    ready = script.last(NodeReady)
    script.open_epoch(2, "c2")
    ghost = RequestFailed(
        id="r1.end",
        writer="conductor",
        request_id="r1",
        epoch=1,
        attempt=1,
        failure=Failure(code="x", message="x"),
        history=b"",
    )
    script.say(SUBJECTS.walk("r1"), ghost)
    assert script.request().phase is Phase.RUNNING
    script.complete(ready)
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_a_recorded_decision_that_is_not_ours_fails_the_request_with_a_divergence(script: Script) -> None:
    script.submit()
    ready = script.last(NodeReady)
    script.lead = False
    script.complete(ready)
    script.lead = True
    wrong = script.cluster.outstanding()[0]
    assert isinstance(wrong, NodeReady)
    script.publish([msgspec.structs.replace(wrong, seed=wrong.seed + 1)])
    script.settle()
    assert script.last(RequestFailed).failure.code == "divergence"


def test_an_end_that_is_decided_and_not_stored_survives_a_divergence(script: Script) -> None:
    script.submit()
    while script.request().phase is Phase.RUNNING:
        script.lead = len(script.request().results) < 1
        script.complete(script.last(NodeReady))
    (end,) = script.cluster.outstanding()
    foreign = msgspec.structs.replace(script.last(NodeReady), id="r1.ready.9.9.0", index=9)
    script.say(SUBJECTS.ready(0, "r1"), foreign)
    assert script.folded[-1].divergence is not None
    assert script.cluster.outstanding() == [end]


# ---- what cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"{",
        b"[]",
        b"{}",
        b'{"model": "demo"}',
        b'{"model": "demo", "inputs": {"text": "a", "messages": []}}',
        b'{"model": "demo", "inputs": {"text": "a"}, "params": {"temprature": 1}}',
        b'{"model": "demo", "inputs": {"text": "a"}, "params": {"max_tokens": 0}}',
        b'{"model": "demo", "inputs": {"text": "a"}, "request_id": "another"}',
        b"[" * 100_000,
        b'{"model": "demo", "inputs": {"text": "a"}, "writer": "conductor"}',
        b'{"model": "demo", "inputs": {"text": "a"}, "origin": ""}',
        b'{"model": "demo", "inputs": {"messages": [{"role": "user", "content": '
        + b"[" * 950
        + b"]" * 950
        + b"}]}}",
        b'{"model": "demo", "inputs": {"messages": [{"role": "user", "content": "a", "n": '
        + b"9" * 30
        + b"}]}}",
        msgspec.msgpack.encode({"model": "demo", "inputs": {"messages": [{"role": {1: 2}}]}}),
        encode(
            completion(
                NodeReady(
                    id="x",
                    rank=0,
                    model="demo",
                    walks=[],
                    placement={},
                    origin="nats",
                    seed=0,
                    reason="",
                    history=b"",
                )
            )
        ),
    ],
)
def test_a_malformed_submission_gets_a_typed_rejection_and_harms_nobody(script: Script, data: bytes) -> None:
    script.submit("good")
    seq = script.say(SUBJECTS.request("bad"), data)
    rejected = script.last(RequestRejected, "bad")
    assert rejected is not None
    assert (rejected.failure.code, rejected.submission_seq) == ("malformed_request", seq)
    script.run_to_the_end("good")
    assert script.request("good").phase is Phase.FINISHED


def test_junk_on_any_other_subject_is_noted_and_ignored(script: Script) -> None:
    script.submit()
    subjects = [SUBJECTS.walk("r1"), SUBJECTS.ready(0, "r1"), SUBJECTS.done(0, "r1"), SUBJECTS.worker(0)]
    for subject in [*subjects, SUBJECTS.epoch, SUBJECTS.control("r1"), "ds.walk.a.b.c"]:
        script.say(subject, b"junk")
        assert script.folded[-1].note is not None
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_a_json_submission_is_the_same_request_as_its_msgpack_twin(script: Script) -> None:
    script.submit(inputs=Inputs(text="hi"), params=Params(max_tokens=4, temperature=0))
    twin = b'{"model":"demo","inputs":{"text":"hi"},"params":{"max_tokens":4,"temperature":0}}'
    script.say(SUBJECTS.request("r1"), twin)
    assert script.last(RequestRejected) is None


def test_an_ended_request_keeps_neither_prompt_nor_tokens_in_memory(script: Script) -> None:
    script.submit(inputs=Inputs(text="a secret " * 1000))
    script.run_to_the_end()
    assert len(encode(script.request().submission)) < 400
    assert script.request().results == ()
    script.submit(inputs=Inputs(text="a secret " * 1000))
    assert script.last(RequestRejected) is None


@pytest.mark.parametrize(
    "name", ["*", ">", "a*b", "L" * 4000, "\x1b[2J", "a\N{NO-BREAK SPACE}b", "\x01", "a\u2028b"]
)
def test_a_submission_nobody_could_be_told_about_is_noted_and_harms_nobody(script: Script, name: str) -> None:
    script.say(SUBJECTS.request(name), b'{"model":"demo","inputs":{"text":"hi"}}')
    assert script.last(RequestRejected) is None
    note = script.folded[-1].note
    assert note is not None
    assert len(note) < 1000
    script.submit("good")
    script.run_to_the_end("good")
    assert script.request("good").phase is Phase.FINISHED


def test_a_submission_under_an_odd_id_is_told_so(script: Script) -> None:
    seq = script.say(SUBJECTS.request("a/b"), b'{"model":"demo","inputs":{"text":"hi"}}')
    rejected = script.last(RequestRejected, "a/b")
    assert rejected is not None
    assert (rejected.failure.code, rejected.submission_seq) == ("malformed_request", seq)


def test_what_ended_longer_ago_than_the_log_goes_back_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_FORGET_EVERY", 3)
    script = Script()
    script.cluster.retention = msgspec.structs.replace(
        retention.LIVE,
        digests_ns=30_000_000,  # thirty records of the script
    )
    script.open_epoch()
    script.join()
    for number in range(40):
        script.submit(f"r{number}")
        script.run_to_the_end(f"r{number}")
    ended = script.cluster.digests
    assert list(ended)[-1] == "r39"
    assert 3 < len(ended) < 12
    assert min(at_ns for at_ns, _ in ended.values()) > script.cluster.now_ns - 80_000_000
