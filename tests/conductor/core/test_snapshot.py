"""A snapshot and what follows it come to the same as the whole log, wherever it is cut."""

import random
import struct
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import msgspec
import pytest

from conductor.core import retention, snapshot
from conductor.core.cluster import Cluster
from conductor.core.request import Request
from conductor.core.retention import LIVE
from conductor.core.snapshot import SnapshotError
from shared.adapters import Adapter
from shared.events import (
    AdapterLoaded,
    DeadlinePassed,
    Failure,
    Guide,
    Inputs,
    NodeReady,
    Params,
    RequestFailed,
    RequestSubmitted,
)
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor import speech
from tests.conductor.script import LIMITS, SUBJECTS, Script
from tests.conductor.speech import deployment, key_of, part

SEEDS = range(24)
KEPT = [field.name for field in fields(Cluster) if field.name not in snapshot.CACHES]


class History(Script):
    """A history of chance: requests of all kinds on ranks that come and go, under conductors that do, too."""

    def __init__(self, seed: int) -> None:
        serve = deployment("replicas", limits=msgspec.structs.replace(LIMITS, max_attempts=2))
        super().__init__(serve=serve, graph_of=speech.graph_of)
        self.chance = random.Random(seed)
        self.lives = 0
        self.open_epoch()
        for rank in range(3):
            self.begin_life(rank)
        adapter = Adapter(name="sql", digest="00", folder="/sql")
        self.say(SUBJECTS.adapter("sql"), AdapterLoaded(adapter=adapter))
        for _ in range(self.chance.choice([20, 60])):
            self.happen()

    def happen(self) -> None:
        chance, one = self.chance, f"r{self.chance.randint(1, 6)}"
        match chance.choices(range(10), [6, 12, 2, 2, 1, 1, 1, 1, 1, 1])[0]:
            case 0:
                kind = chance.choice(["solo", "duet", "trio"])
                fields = {"timeout_s": 0.001} if chance.random() < 0.2 else {}
                self.submit(one, inputs=Inputs(text=kind), **fields)
            case 1:
                self.do_a_part()
            case 2:
                self.begin_life(chance.randint(0, 2))
            case 3:
                self.lose(chance.randint(0, 2))
            case 4:
                self.leave(chance.randint(0, 2))
            case 5:
                self.cancel(one)
            case 6:
                self.lead = chance.random() < 0.5
                self.open_epoch(self.cluster.fence.epoch + 1, f"c{chance.randint(1, 2)}")
            case 7:
                self.say(SUBJECTS.request(one), chance.choice([b"junk", b'{"model": 3}']))
            case 8:
                self.pass_a_deadline()
            case _:
                self.store(SUBJECTS.done(0, one), b"\xc1")
                self.settle()

    def begin_life(self, rank: int) -> None:
        self.lives += 1
        self.join(f"w{rank}-{self.lives}", rank)

    def do_a_part(self) -> None:
        """A rank reports: mostly that it did its part, at times that it could not."""
        orders = [order for order in self.events(NodeReady) if self._is_out(order)]
        if not orders:
            return
        order = self.chance.choice(orders)
        if self.chance.random() < 0.1:
            gone = key_of(order, "prepare", "prepare", "ids")
            self.fail(order, Failure(code="tensor_gone", message="its owner is dead"), gone)
        else:
            self.say(SUBJECTS.done(order.rank, str(order.request_id)), part(order))

    def _is_out(self, order: NodeReady) -> bool:
        request = self.cluster.open.get(str(order.request_id))
        step = request.step(order.index) if request is not None else None
        is_now = step is not None and order.attempt == (request.attempt if request is not None else 0)
        return (
            is_now and step is not None and order.rank in step.incarnations and order.rank not in step.parts
        )

    def pass_a_deadline(self) -> None:
        for deadline in self.cluster.deadlines()[:1]:
            event = DeadlinePassed(
                id=f"{deadline.request_id}.deadline.{len(self.records)}",
                writer=CONDUCTOR_WRITER,
                epoch=self.cluster.fence.epoch,
                request_id=deadline.request_id,
                attempt=deadline.attempt,
                deadline_ns=deadline.at_ns,
                step=deadline.step,
            )
            self.say(SUBJECTS.walk(deadline.request_id), event)


@cache
def records(seed: int) -> tuple[StoredRecord, ...]:
    return tuple(History(seed).records)


def empty() -> Cluster:
    return Cluster(speech.graph_of, SUBJECTS)


def through_bytes(cluster: Cluster) -> Cluster:
    return snapshot.load(snapshot.dump(cluster), speech.graph_of, SUBJECTS)


def state(cluster: Cluster) -> dict[str, Any]:
    """All that is kept of a cluster, maps in their order."""
    found = {name: getattr(cluster, name) for name in KEPT}
    return {name: list(value.items()) if isinstance(value, dict) else value for name, value in found.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_and_the_tail_are_the_whole_fold_wherever_it_is_cut(seed: int) -> None:
    log = records(seed)
    whole = empty()
    folded = [whole.fold(record) for record in log]
    cut_at = empty()
    for cut, record in enumerate(log, start=1):
        cut_at.fold(record)
        if cut % 3:
            continue
        restored = through_bytes(cut_at)
        assert [restored.fold(later) for later in log[cut:]] == folded[cut:]
        assert state(restored) == state(whole)
        assert restored.outstanding() == whole.outstanding()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_leader_knows_comes_back_as_it_was(seed: int) -> None:
    """With what it decided a moment ago, and is not in the log yet."""
    history = History(seed)
    restored = through_bytes(history.cluster)
    assert state(restored) == state(history.cluster)
    assert restored.schedule(history.deployment) == history.cluster.schedule(history.deployment)
    assert sorted(restored.deadlines(), key=repr) == sorted(history.cluster.deadlines(), key=repr)


def test_of_every_field_that_is_kept_there_was_something_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is new is neither forgotten nor kept unseen; what is no state is named in `CACHES`."""
    monkeypatch.setattr(retention, "_FORGET_EVERY", 1)
    seen: set[str] = set()
    fresh = state(empty())
    for seed in SEEDS:
        cluster = empty()
        cluster.retention = msgspec.structs.replace(LIVE, digests=2)
        for record in records(seed):
            cluster.fold(record)
            seen |= {name for name, value in state(cluster).items() if value != fresh[name]}
    assert set(KEPT) == seen
    assert {field.name for field in fields(Cluster)} >= snapshot.CACHES


def test_the_histories_have_what_recovery_is_about() -> None:
    events = [event for seed in SEEDS for event in History(seed).events()]
    kinds = {type(event).__name__ for event in events}
    assert {"RequestResumed", "OutputFence", "WalkStop", "WorkerLost", "RequestFinished"} <= kinds
    codes = {event.failure.code for event in events if isinstance(event, RequestFailed)}
    assert {"poison_request", "deadline_exceeded"} <= codes


def test_requests_that_are_chosen_from_are_the_same_objects_again() -> None:
    script = Script(lead=False)
    script.submit("r1")
    restored = through_bytes(script.cluster)
    assert restored.waiting["r1"] is restored.open["r1"]


def test_what_a_client_wrote_comes_back_as_it_was() -> None:
    script = Script(lead=False)
    schema = {"type": "object", "properties": {"b": {"const": 1.5}, "a": True}}
    params = Params(
        logit_bias={7: -1.5}, bad_words=["no", [3, 4]], stop=["\n"], seed=-(2**63), voice="tara",
        guide=Guide(json_schema=schema),
    )  # fmt: skip
    messages = [{"role": "user", "content": [{"type": "text", "text": "é\0🎭", "n": [1, 2.5, None, True]}]}]
    script.submit("r1", inputs=Inputs(messages=messages), params=params, timeout_s=3.5, trace="00-1")
    assert through_bytes(script.cluster).open["r1"] == script.request("r1")


# ---- in pieces -------------------------------------------------------------------------------------
def busy(requests: int) -> Script:
    script = Script(lead=False)
    for number in range(requests):
        event = RequestSubmitted(id=f"e{number}", model="demo", inputs=Inputs(text="x" * 200))
        script.store(SUBJECTS.request(f"r{number}"), msgspec.msgpack.encode(event))
    script.settle()
    return script


def test_the_pieces_are_of_the_moment_in_which_they_were_asked_for() -> None:
    script = busy(200)
    before = snapshot.dump(script.cluster)
    begun = snapshot.pieces(script.cluster)
    first = next(begun)
    script.open_epoch(9)
    script.join()
    script.submit("another")
    script.cancel("r1")
    assert first + b"".join(begun) == before


def test_no_piece_is_of_more_than_a_few_requests() -> None:
    largest = max(map(len, snapshot.pieces(busy(500).cluster)))
    assert largest < len(msgspec.msgpack.encode(busy(1).request("r0"))) * 40


# ---- what is no snapshot ---------------------------------------------------------------------------
def damaged() -> Iterator[bytes]:
    data = snapshot.dump(History(3).cluster)
    yield from (data[:length] for length in range(0, len(data) - 1, max(1, len(data) // 200)))
    yield data + b"\0"
    yield struct.pack("<I", 1) + b"\xc1"
    yield data + struct.pack("<I", 9) + msgspec.msgpack.encode(["unheard", 1])
    yield data.replace(b"submission_seq", b"submission_sec")


def test_what_is_no_state_of_a_cluster_is_refused() -> None:
    for data in damaged():
        with pytest.raises(SnapshotError):
            snapshot.load(data, speech.graph_of, SUBJECTS)


def test_a_choice_of_a_request_that_is_not_open_is_refused() -> None:
    script = Script(lead=False)
    script.submit("r1")
    script.cluster.open.clear()
    with pytest.raises(SnapshotError, match="r1"):
        through_bytes(script.cluster)


def test_all_maps_of_requests_are_choices_from_the_open_ones() -> None:
    """So that no request is written twice, and none is restored twice."""
    kept = snapshot._kept()
    choices = {name for name, kind in kept.items() if snapshot._is_choice(name, kind)}
    maps = {name for name, kind in kept.items() if Request in getattr(kind, "__args__", ())}
    assert choices == maps - {"open", "ended"}
    for seed in SEEDS:
        cluster = History(seed).cluster
        for name in choices:
            assert all(cluster.open[one] is request for one, request in getattr(cluster, name).items())
