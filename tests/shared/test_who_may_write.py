"""Every type of event by every role about a request that is not its own: void in every reader (ADR 26).

A request runs on rank 0. The forgers hold genuine keys, so they publish on the subjects that a server lets
them: `worker-1` has no part in the request, `worker-0` is an incarnation of rank 0 that is over, and a client
is not the one that asked.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest

from conductor.core.replay import Replayer
from dalsegno.replay.recorded_run import run_of
from gateway.requests.relay import RecordRouter, Relay
from models import registry
from shared.epoch_fence import EpochFence
from shared.events import (
    MalformedEventError,
    NodeReady,
    OutputChunk,
    RequestFinished,
    RequestRejected,
    decode,
)
from shared.ids import Rank
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.nats.permissions import permissions
from shared.log.port import StoredRecord
from shared.subject_rules import EVENT_TYPES, WRITERS, read_event
from shared.transcript import Transcript
from tests.attack.forged_events import HOMES, Aim, Forgery, forgeries, subjects
from tests.conductor.script import SUBJECTS, Script
from workers.execution.recovered_output import OutputRecovery, RecoveredTrack
from workers.membership.peers import PeerJoined, PeerLeft
from workers.orders.inbox import Action, Inbox, StepKey, Unreadable

OF_ITS_OWN = {
    ("worker-1", "worker.joined.v1"): "rank 1 has a new incarnation, which no request is placed on",
    ("worker-1", "worker.leaving.v1"): "rank 1 leaves",
    ("worker-0", "worker.joined.v1"): "rank 0 has a new incarnation: a worker may restart",
    ("client", "request.cancel.v1"): "any client may cancel by the request's id, which is its secret",
    ("client", "request.submitted.v1"): "a conflict: the submission is refused, the request goes on",
}
"""The events that a role may write, with their effects; all others are void."""


@dataclass
class Scene:
    """A request under way on rank 0, and all its readers; they have read the log so far."""

    script: Script = field(default_factory=Script)
    transcript: Transcript = field(default_factory=Transcript)
    read: int = 0
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        script = self.script
        script.open_epoch()
        self.over = script.join("w0-a", 0)
        script.join("w1-a", 1)
        self.life = script.join("w0-b", 0)
        self.router = RecordRouter(MemoryLog(MemoryStore(SUBJECTS)), SUBJECTS, EpochFence())
        self.relay: Relay = self.router.open("r1")
        self.inbox = Inbox(SUBJECTS, Rank(0), "w0-b")
        script.submit()
        script.complete(script.last(NodeReady))
        self.order: NodeReady = script.last(NodeReady)
        self.speak("genuine ")
        self.follow()

    def speak(self, text: str) -> None:
        """The worker of rank 0 puts a chunk out."""
        index = self.transcript.next_index
        chunk = OutputChunk(
            id=f"genuine.{index}", writer="w0", request_id="r1", attempt=self.order.attempt,
            incarnation=self.order.incarnation, index=index, text=text, token_ids=[index],
        )  # fmt: skip
        self.transcript.fold(chunk)
        self.script.say(SUBJECTS.output("nats", "r1", "w0"), chunk)

    def follow(self) -> None:
        """Let the gateway and the worker read what is new."""
        for record in self.script.records[self.read :]:
            self.router.route(record)
            if not record.subject.startswith(("ds.request", "ds.control", "ds.done", "ds.output")):
                action = self.inbox.fold(record)
                if action is not None:
                    self.actions.append(action)
        self.read = len(self.script.records)

    def take(self, forgery: Forgery) -> str:
        """Let everybody read a forged event; return what it did to the request or to rank 0."""
        script, inbox = self.script, len(self.actions)
        before, ranks, length = script.request(), script.cluster.world.ranks[0], len(script.records)
        items, totals = self.relay.output.emitted, self.relay.output.output.transcript.totals
        script.say(forgery.subject, forgery.data)
        self.follow()
        changed = []
        if script.request() != before or script.cluster.world.ranks[0] != ranks:
            changed.append("the conductor's state")
        decisions = [decode(one.data) for one in script.records[length + 1 :]]
        if [one for one in decisions if not isinstance(one, RequestRejected)]:  # refuses the forgery alone
            changed.append(f"decisions {decisions}")
        if self.relay.output.ended or (self.relay.output.emitted, totals) != (
            items, self.relay.output.output.transcript.totals,
        ):  # fmt: skip
            changed.append("the answer")
        acted = [one for one in self.actions[inbox:] if not _is_about_another_rank(one)]
        return ", ".join([*changed, *(f"the worker's {type(one).__name__}" for one in acted)])


def _is_about_another_rank(action: Action) -> bool:
    return isinstance(action, Unreadable) or (isinstance(action, PeerJoined | PeerLeft) and action.rank != 0)


def forged(scene: Scene, role: str) -> Iterator[Forgery]:
    """Every event that a role can get stored, about the request, on its own subjects."""
    by = 1 if role == "worker-1" else 0
    life = scene.over if role == "worker-0" else scene.life
    aim = Aim(
        request_id="r1", origin="nats", rank=0, incarnation=life, by=by, epoch=99, next_index=1,
        ids={"walk.completed.v1": [f"{scene.order.id}.done"], "output.chunk.v1": ["genuine.1"]},
    )  # fmt: skip
    allowed = permissions(role, SUBJECTS, "_INBOX_x").publish
    for home, subject in subjects(aim).items():
        if any(_matches(pattern, subject) for pattern in allowed):
            yield from (one for one in forgeries(aim, home) if role != "worker-0" or _is_readable(one))


def _is_readable(forgery: Forgery) -> bool:
    """Rank 0 runs the request, so a record of it that nobody can read is rightly a mismatch in a replay."""
    with suppress(MalformedEventError):
        return bool(read_event(StoredRecord(1, forgery.subject, forgery.data, 1), SUBJECTS))
    return False


def _matches(pattern: str, subject: str) -> bool:
    ours, theirs = pattern.split("."), subject.split(".")
    return len(ours) == len(theirs) and all(a in ("*", b) for a, b in zip(ours, theirs, strict=True))


ROLES = ("worker-1", "worker-0", "client", "gateway", "reader", "provisioner")


def test_the_table_names_the_writer_of_every_event_type() -> None:
    assert set(WRITERS) == {kind for kinds in EVENT_TYPES.values() for kind in kinds}
    told = msgspec.inspect.multi_type_info(WRITERS)
    assert {one.tag for one in told if isinstance(one, msgspec.inspect.StructType)} == set(HOMES)


@pytest.mark.parametrize("role", ROLES)
def test_nothing_about_anothers_request_has_an_effect_in_any_reader(role: str) -> None:
    scene = Scene()
    count = 0
    for forgery in forged(scene, role):
        key = ("client" if role == "gateway" else role, forgery.kind)
        if key in OF_ITS_OWN and forgery.subject == subjects_of_home(forgery, role):
            continue
        count += 1
        assert scene.take(forgery) == "", str(forgery)
    assert count or role in {"reader", "provisioner"}
    # The request goes on as if nothing had been said, and all who read it afterwards agree.
    scene.speak("answer")
    scene.script.complete(scene.order, output=scene.transcript.totals)
    scene.follow()
    assert scene.script.last(RequestFinished).output == scene.transcript.totals
    assert scene.relay.output.ended
    records = scene.script.records
    verdict = Replayer(registry.graph, SUBJECTS).run(records)["r1"]
    assert verdict.mismatch is None
    assert run_of(records, SUBJECTS, "r1").text("") == "genuine answer"
    assert recovered(records, scene.order).state.track.totals == scene.transcript.totals


def subjects_of_home(forgery: Forgery, role: str) -> str:
    """The subject where this type belongs, of the role's own."""
    rank = 1 if role == "worker-1" else 0
    aim = Aim(request_id="r1", origin="nats", rank=0, incarnation=1, by=rank, epoch=1)
    return subjects(aim)[HOMES[forgery.kind]]


def recovered(records: list[StoredRecord], order: NodeReady) -> RecoveredTrack:
    """The output that a successor of the worker continues."""
    recovery = OutputRecovery(SUBJECTS, StepKey("r1", 2, order.index), len(records) + 9)
    for record in records:
        address = SUBJECTS.parse(record.subject)
        if address is not None and address.request_id in (None, "r1"):
            recovery.fold(record)
    return recovery.result()[""]


@pytest.mark.parametrize("role", ["worker-1", "worker-0"])
def test_the_same_holds_after_the_worker_died_and_the_request_was_resumed(role: str) -> None:
    scene = Scene()
    scene.script.lose(0)
    scene.follow()
    for forgery in forged(scene, role):  # nobody has an order now
        if (role, forgery.kind) not in OF_ITS_OWN:
            assert scene.take(forgery) == "", str(forgery)
    scene.script.join("w0-c", 0)
    scene.follow()
    scene.order = scene.script.last(NodeReady)
    scene.inbox = Inbox(SUBJECTS, Rank(0), "w0-c")
    for forgery in forged(scene, role):
        if (role, forgery.kind) not in OF_ITS_OWN:
            assert scene.take(forgery) == "", str(forgery)
    scene.speak("answer")
    scene.script.complete(scene.order, output=scene.transcript.totals)
    assert Replayer(registry.graph, SUBJECTS).run(scene.script.records)["r1"].mismatch is None
    assert run_of(scene.script.records, SUBJECTS, "r1").text("") == "genuine answer"
