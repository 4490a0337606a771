"""The rules for events on a subject, for writers with permission to publish there."""

from typing import get_args

import pytest

from gateway.requests.relay import RecordRouter
from shared.epoch_fence import EpochFence
from shared.events import (
    AnyEvent,
    EpochOpened,
    Event,
    MalformedEventError,
    OutputChunk,
    OutputFence,
    OutputTotals,
    RequestCancel,
    RequestFinished,
    RequestsRefused,
    Usage,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    encode,
)
from shared.ids import Rank
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import StoredRecord
from shared.subject_rules import EVENT_TYPES, check_event_subject
from shared.subjects import CONDUCTOR_WRITER, Subjects
from tests.admissions import admitted
from tests.conductor.script import Script
from workers.orders.inbox import Inbox, Unreadable

SUBJECTS = Subjects()
CHUNK = OutputChunk(id="1", writer="w0", request_id="r1", attempt=1, text="a")
FENCE = OutputFence(writer=CONDUCTOR_WRITER, epoch=9, request_id="r1", attempt=2, reason="lost", history=b"")
FINISHED = RequestFinished(
    writer=CONDUCTOR_WRITER,
    epoch=9,
    request_id="r1",
    usage=Usage(prompt_tokens=1, completion_tokens=1),
    finish_reasons=["stop"],
    output=OutputTotals(chunks=0, digest=""),
    history=b"",
)
OPENED = EpochOpened(writer=CONDUCTOR_WRITER, epoch=9, conductor="c", core="x")
JOINED = WorkerJoined(id="w0.joined", rank=0, model="demo", nodes=["llm"], device="cpu")
LOST = WorkerLost(writer=CONDUCTOR_WRITER, epoch=9, rank=0, incarnation=1, reason="silent")
REFUSED = RequestsRefused(writer="g-1", since_ns=1, counts=[])

ITS_OWN = [
    (SUBJECTS.output("g", "r1", "w0"), CHUNK),
    (SUBJECTS.output("g", "r1", CONDUCTOR_WRITER), FENCE),
    (SUBJECTS.walk("r1"), FINISHED),
    (SUBJECTS.epoch, OPENED),
    (SUBJECTS.worker(0), JOINED),
    (SUBJECTS.lost, LOST),
    (SUBJECTS.control("r1"), RequestCancel(request_id="r1")),
    (SUBJECTS.refused("g-1"), REFUSED),
]
NOT_ITS_OWN = [
    (SUBJECTS.output("g", "r1", "w0"), FINISHED),
    (SUBJECTS.output("g", "r1", "w0"), FENCE),
    (SUBJECTS.output("g", "r1", "w0"), OPENED),
    (SUBJECTS.output("g", "r2", "w0"), CHUNK),
    (SUBJECTS.edge(1, 0, "r1"), FINISHED),
    (SUBJECTS.done(0, "r1"), FINISHED),
    (SUBJECTS.done(1, "r1"), WalkStopped(request_id="r1", rank=0, steps_after=0)),
    (SUBJECTS.refused("g-2"), REFUSED),
    (SUBJECTS.refused("g-1"), RequestCancel(request_id="r1")),
    (SUBJECTS.request("r1"), REFUSED),
    (SUBJECTS.control("r1"), REFUSED),
    (SUBJECTS.output("g", "r1", "w0"), REFUSED),
    (SUBJECTS.worker(1), REFUSED),
    (SUBJECTS.worker(1), JOINED),
    (SUBJECTS.worker(1), WorkerLeaving(rank=0)),
    (SUBJECTS.worker(1), LOST),
    (SUBJECTS.worker(1), OPENED),
    (SUBJECTS.control("r1"), FINISHED),
    (SUBJECTS.control("r1"), RequestCancel(request_id="r2")),
    (SUBJECTS.request("r1"), RequestCancel(request_id="r1")),
]


def test_every_kind_of_event_has_one_place() -> None:
    placed = [kind for kinds in EVENT_TYPES.values() for kind in kinds]

    assert len(placed) == len(set(placed))
    assert set(placed) == set(get_args(AnyEvent))


@pytest.mark.parametrize(("subject", "event"), ITS_OWN)
def test_what_belongs_there_is_taken(subject: str, event: AnyEvent) -> None:
    address = SUBJECTS.parse(subject)
    assert address is not None
    check_event_subject(address, event)


@pytest.mark.parametrize(("subject", "event"), NOT_ITS_OWN)
def test_what_does_not_is_no_event(subject: str, event: AnyEvent) -> None:
    address = SUBJECTS.parse(subject)
    assert address is not None
    with pytest.raises(MalformedEventError):
        check_event_subject(address, event)


# ---- every reader ------------------------------------------------------------------------------------
async def test_a_gateway_ends_no_answer_by_a_workers_word(caplog: pytest.LogCaptureFixture) -> None:
    log = MemoryLog(MemoryStore(subjects=SUBJECTS))
    router = RecordRouter(log, SUBJECTS, EpochFence(1))
    relay = router.open("r1")
    relay.submitted_at(1)
    router.route(StoredRecord(2, SUBJECTS.walk("r1"), encode(admitted("r1")), 2))
    for seq, event in enumerate((OPENED, FENCE, FINISHED), start=3):
        router.route(StoredRecord(seq, SUBJECTS.output("g", "r1", "w0"), encode(event), seq))
    router.route(StoredRecord(9, SUBJECTS.output("g", "r1", "w0"), encode(CHUNK), 9))

    assert not relay.output.ended
    assert relay.output.emitted == 1  # neither fenced nor of a closed epoch
    assert len(caplog.records) == 3


@pytest.mark.parametrize("event", [JOINED, WorkerLeaving(rank=0, incarnation=7)])
def test_a_worker_gives_its_rank_up_to_no_other_ranks_process(event: Event) -> None:
    inbox = Inbox(SUBJECTS, Rank(0), "w0.joined.ours", epoch=1)
    inbox.fold(StoredRecord(7, SUBJECTS.worker(0), encode(_joined("w0.joined.ours")), 7))
    action = inbox.fold(StoredRecord(8, SUBJECTS.worker(1), encode(event), 8))

    assert isinstance(action, Unreadable)


def test_a_conductor_takes_no_other_ranks_word_for_a_life() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    before = script.cluster.world.ranks[Rank(0)].incarnation
    script.say(SUBJECTS.worker(1), encode(_joined("w0.joined.forged")))
    script.say(SUBJECTS.worker(1), encode(WorkerLeaving(rank=0, incarnation=before)))

    assert script.cluster.world.ranks[Rank(0)].incarnation == before
    assert all("unreadable" in str(folded.note) for folded in script.folded[-2:])


def _joined(id: str) -> WorkerJoined:
    return WorkerJoined(id=id, rank=0, model="demo", nodes=["llm"], device="cpu")
