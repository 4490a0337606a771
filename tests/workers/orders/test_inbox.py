from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from shared.events import (
    EpochOpened,
    Event,
    Failure,
    NodeFired,
    NodeReady,
    OutputTotals,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    Usage,
    WalkStop,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    encode,
)
from shared.ids import Incarnation, Rank
from shared.log.port import StoredRecord
from shared.subjects import Subjects
from workers.membership.peers import PeerIncarnations, PeerJoined, PeerLeft
from workers.orders.inbox import (
    Action,
    AttemptEnded,
    Inbox,
    IncarnationBegun,
    IncarnationLost,
    IncarnationSuperseded,
    RequestEnded,
    StartOrder,
    StepKey,
    StopOrder,
    Unreadable,
)
from workers.orders.out_of_order_buffer import OutOfOrderBuffer, ReceivedEdge

SUBJECTS = Subjects()
OURS = "w0.joined.ours"
AT = 1000  # where our joined is stored


def subject_of(event: Event) -> str:
    match event:
        case NodeReady() | WalkStop():
            return SUBJECTS.ready(event.rank, str(event.request_id))
        case WorkerJoined() | WorkerLeaving():
            return SUBJECTS.worker(event.rank)
        case NodeFired() | StreamSent() | StreamTaken() | TensorsReleased():
            return SUBJECTS.edge(0, 1, str(event.request_id))
        case RequestFinished() | RequestCancelled() | RequestRejected() | RequestResumed():
            return SUBJECTS.walk(str(event.request_id))
        case _:
            return SUBJECTS.epoch


def joined(id: str = OURS, rank: int = 0) -> WorkerJoined:
    return WorkerJoined(id=id, rank=rank, model="m", nodes=["llm"], device="cpu")


def ready(
    request_id: str = "r",
    attempt: int = 1,
    index: int = 0,
    *,
    incarnation: int = AT,
    epoch: int = 1,
    rank: int = 0,
    id: str | None = None,
    lives: dict[int, int] | None = None,
) -> NodeReady:
    return NodeReady(
        id=id or f"{request_id}.ready.{attempt}.{index}.{rank}",
        writer="conductor",
        request_id=request_id,
        attempt=attempt,
        index=index,
        incarnation=incarnation,
        epoch=epoch,
        rank=rank,
        model="m",
        walks=[],
        placement={},
        origin="g",
        seed=0,
        reason="",
        history=b"",
        lives=lives or {},
    )


def stop(
    request_id: str = "r", attempt: int = 1, index: int = 0, *, incarnation: int = AT, epoch: int = 1
) -> WalkStop:
    return WalkStop(
        id=f"{request_id}.stop.{attempt}.{index}.0",
        writer="conductor",
        request_id=request_id,
        attempt=attempt,
        index=index,
        incarnation=incarnation,
        epoch=epoch,
        rank=0,
        reason="cancelled",
        history=b"",
    )


def opened(epoch: int) -> EpochOpened:
    return EpochOpened(id=f"epoch.{epoch}", writer="conductor", epoch=epoch, conductor="c", core="x")


def lost(incarnation: int, rank: int = 0) -> WorkerLost:
    return WorkerLost(
        id="l", writer="conductor", epoch=1, rank=rank, incarnation=incarnation, reason="silent"
    )


THEIRS = 500
LIVES = {0: AT, 1: THEIRS}


def inbox_of(**settings: Any) -> Inbox:
    """Rank 0's inbox, which knows that rank 1 has joined as `THEIRS`."""
    peers = PeerIncarnations()
    peers.joined(joined("w1.joined.theirs", rank=1), THEIRS)
    return Inbox(SUBJECTS, Rank(0), OURS, **{"peers": peers, **settings})


def fired(index: int = 0, attempt: int = 1, *, life: int = THEIRS, request_id: str = "r") -> NodeFired:
    """A `node.fired` of rank 1."""
    return NodeFired(
        id="f",
        writer="w1",
        request_id=request_id,
        attempt=attempt,
        index=index,
        incarnation=life,
        walk=0,
        node="n",
        path=(),
    )


def sent(first: int = 0, attempt: int = 1, *, life: int = THEIRS) -> StreamSent:
    return StreamSent(
        id="s",
        writer="w1",
        request_id="r",
        attempt=attempt,
        index=first,
        incarnation=life,
        stream="s",
        to="n",
    )


def finished(request_id: str = "r", *, epoch: int = 1) -> RequestFinished:
    return RequestFinished(
        id=f"{request_id}.end",
        writer="conductor",
        request_id=request_id,
        epoch=epoch,
        usage=Usage(),
        finish_reasons=[],
        output=OutputTotals(),
        history=b"",
    )


def rejected(request_id: str = "r") -> RequestRejected:
    failure = Failure(code="c", message="m")
    return RequestRejected(
        id="x", writer="conductor", request_id=request_id, epoch=1, submission_seq=1, failure=failure
    )


def resumed(attempt: int, request_id: str = "r", *, epoch: int = 1) -> RequestResumed:
    return RequestResumed(
        id=f"{request_id}.resumed.{attempt}",
        writer="conductor",
        request_id=request_id,
        attempt=attempt,
        epoch=epoch,
        placement={},
        reason="",
    )


def started(request_id: str = "r", attempt: int = 1, index: int = 0) -> StepKey:
    return StepKey(request_id, attempt, index)


def fold(events: Sequence[Event], inbox: Inbox | None = None, start: int = AT) -> list[Action]:
    """Fold events stored at `start`, `start` + 1, ..., and return the actions."""
    inbox = inbox or inbox_of(earlier_joins=["w0.joined.before"])
    records = [
        StoredRecord(seq=start + place, subject=subject_of(event), data=encode(event), time_ns=0)
        for place, event in enumerate(events)
    ]
    return [action for record in records if (action := inbox.fold(record)) is not None]


def briefly(actions: list[Action]) -> list[tuple[str, object]]:
    """Actions as (kind, main content)."""
    return [_brief(action) for action in actions]


def _brief(action: Action) -> tuple[str, object]:
    match action:
        case StartOrder():
            told = tuple(type(early.event).__name__ for early in action.edges)
            return ("start", (action.key, *told) if told else action.key)
        case StopOrder():
            return ("stop" if action.started else "never started", action.key)
        case IncarnationBegun():
            return ("joined", action.incarnation)
        case IncarnationSuperseded():
            return ("superseded", action.incarnation)
        case IncarnationLost():
            return ("lost", action.reason)
        case Unreadable():
            return ("unreadable", None)
        case ReceivedEdge():
            return ("heard", (type(action.event).__name__, action.rank))
        case AttemptEnded():
            return ("over", (action.request_id, action.attempt))
        case RequestEnded():
            return ("ended", action.request_id)
        case PeerJoined():
            return ("met", (action.rank, action.incarnation))
        case PeerLeft():
            return ("parted", (action.rank, action.incarnation))


JOINED = ("joined", AT)
CASES: dict[str, tuple[list[Event], list[tuple[str, object]]]] = {
    "an order for this life starts": ([joined(), ready()], [JOINED, ("start", started())]),
    "the order says what to run": ([joined(), ready(index=3)], [JOINED, ("start", started(index=3))]),
    "a second copy of an order changes nothing": (
        [joined(), ready(), ready(), ready(id="another id")],
        [JOINED, ("start", started())],
    ),
    "a second copy of the own joined changes nothing": (
        [joined(), joined(), ready()],
        [JOINED, ("start", started())],
    ),
    "nothing starts before the own joined is read": ([ready(), joined()], [("joined", AT + 1)]),
    "orders of an earlier life are not ours": ([joined(), ready(incarnation=AT - 1)], [JOINED]),
    "orders of a later life are not ours": ([joined(), ready(incarnation=AT + 1)], [JOINED]),
    "orders of another rank are not ours": ([joined(), ready(rank=1)], [JOINED]),
    "an order of a deposed conductor is void": ([joined(), opened(2), ready(epoch=1)], [JOINED]),
    "its successor's copy of the same order counts": (
        [joined(), opened(2), ready(epoch=1), ready(epoch=2)],
        [JOINED, ("start", started())],
    ),
    "a successor's copy of a known order changes nothing": (
        [joined(), ready(epoch=1), opened(2), ready(epoch=2)],
        [JOINED, ("start", started())],
    ),
    "a lower epoch opened late changes nothing": (
        [joined(), opened(3), opened(2), ready(epoch=2), ready(epoch=3)],
        [JOINED, ("start", started())],
    ),
    "a stop of a deposed conductor is void": (
        [joined(), ready(), opened(2), stop(epoch=1)],
        [JOINED, ("start", started())],
    ),
    "the next step of the same attempt starts": (
        [joined(), ready(), ready(index=1)],
        [JOINED, ("start", started()), ("start", started(index=1))],
    ),
    "the next attempt starts again": (
        [joined(), ready(index=1), ready(attempt=2, index=1)],
        [JOINED, ("start", started(index=1)), ("start", started(attempt=2, index=1))],
    ),
    "a lower attempt behind a higher one is over": (
        [joined(), ready(attempt=2), ready(attempt=1, index=1)],
        [JOINED, ("start", started(attempt=2))],
    ),
    "requests do not touch one another": (
        [joined(), ready(attempt=2), ready("q"), stop("q")],
        [JOINED, ("start", started(attempt=2)), ("start", started("q")), ("stop", started("q"))],
    ),
    "a stop of a running step stops it, once": (
        [joined(), ready(), stop(), stop()],
        [JOINED, ("start", started()), ("stop", started())],
    ),
    "a stop of an unknown step does nothing": ([joined(), stop()], [JOINED]),
    "a stop of another life's step does nothing": (
        [joined(), ready(), stop(incarnation=AT - 1)],
        [JOINED, ("start", started())],
    ),
    "a stop of an older attempt does nothing": (
        [joined(), ready(), ready(attempt=2), stop(attempt=1)],
        [JOINED, ("start", started()), ("start", started(attempt=2))],
    ),
    "an order stored behind its stop never starts": (
        [joined(), stop(), ready(), ready()],
        [JOINED, ("never started", started())],
    ),
    "a later attempt starts although an earlier was stopped": (
        [joined(), stop(), ready(attempt=2)],
        [JOINED, ("start", started(attempt=2))],
    ),
    "a newer life of this rank supersedes this one": (
        [joined(), joined("w0.joined.next")],
        [JOINED, ("superseded", AT + 1)],
    ),
    "a late copy of an earlier life is no newer one": ([joined(), joined("w0.joined.before")], [JOINED]),
    "a life stored ahead of ours is an earlier one, also when it is stored twice": (
        [joined("w0.joined.other"), joined(), joined("w0.joined.other")],
        [("joined", AT + 1)],
    ),
    "another rank's life is met, and is not ours": (
        [joined(), joined("w1.joined.x", rank=1), joined("w1.joined.x", rank=1)],
        [JOINED, ("met", (1, AT + 1))],
    ),
    "the conductor may give this life up": ([joined(), lost(AT)], [JOINED, ("lost", "silent")]),
    "giving up another life is not ours": ([joined(), lost(AT - 1), lost(AT, rank=1)], [JOINED]),
    "what another rank tells of a step that has begun is heard": (
        [joined(), ready(lives=LIVES), fired(), sent()],
        [JOINED, ("start", started()), ("heard", ("NodeFired", 1)), ("heard", ("StreamSent", 1))],
    ),
    "what it tells earlier waits for the order": (
        [joined(), fired(), sent(), fired(1), ready(lives=LIVES), ready(index=1, lives=LIVES)],
        [
            JOINED,
            ("start", (started(), "NodeFired", "StreamSent")),
            ("start", (started(index=1), "NodeFired")),
        ],
    ),
    "a stream is the attempt's, whichever of its steps has begun": (
        [joined(), ready(index=3, lives=LIVES), sent()],
        [JOINED, ("start", started(index=3)), ("heard", ("StreamSent", 1))],
    ),
    "what another life tells counts for nothing, earlier or later": (
        [joined(), fired(life=THEIRS - 1), ready(lives=LIVES), fired(life=THEIRS + 1), sent(life=1)],
        [JOINED, ("start", started())],
    ),
    "an order that names no lives hears nobody": (
        [joined(), fired(), ready(), fired()],
        [JOINED, ("start", started())],
    ),
    "what a lower attempt tells counts for nothing": (
        [joined(), sent(attempt=1), fired(), ready(attempt=2, lives=LIVES), fired(), sent(attempt=1)],
        [JOINED, ("start", started(attempt=2))],
    ),
    "what a higher attempt tells waits for its order": (
        [joined(), ready(lives=LIVES), fired(attempt=2), ready(attempt=2, lives=LIVES)],
        [JOINED, ("start", started()), ("start", (started(attempt=2), "NodeFired"))],
    ),
    "the end of a request is told once, and nothing of it counts behind that": (
        [joined(), fired(), finished(), finished(), ready(lives=LIVES), fired(), stop()],
        [JOINED, ("ended", "r")],
    ),
    "the end of a request that a deposed conductor tells is none": (
        [joined(), opened(2), finished(epoch=1)],
        [JOINED],
    ),
    "a submission that was refused ends nothing of its name": (
        [joined(), ready(), rejected(), ready(index=1)],
        [JOINED, ("start", started()), ("start", started(index=1))],
    ),
    "a stop ends its attempt: what others tell of it counts for nothing any more": (
        [joined(), ready(lives=LIVES), fired(1), stop(), fired(), sent(), ready(index=1, lives=LIVES)],
        [JOINED, ("start", started()), ("stop", started()), ("start", started(index=1))],
    ),
    "what others tell of the attempt behind a stop waits for its order": (
        [joined(), ready(lives=LIVES), stop(), fired(attempt=2), ready(attempt=2, lives=LIVES)],
        [
            JOINED,
            ("start", started()),
            ("stop", started()),
            ("start", (started(attempt=2), "NodeFired")),
        ],
    ),
    "a request that is resumed leaves its attempts before behind, also where it goes on no more": (
        [joined(), ready(lives=LIVES), resumed(3), fired(), ready(attempt=2), fired(attempt=3)],
        [JOINED, ("start", started()), ("over", ("r", 1))],
    ),
    "its first word here may be that it is resumed": (
        [joined(), fired(attempt=1), resumed(2), ready(attempt=2, lives=LIVES)],
        [JOINED, ("start", started(attempt=2))],
    ),
    "a copy of it, behind its orders, ends nothing": (
        [joined(), resumed(2), ready(attempt=2), resumed(2), ready(attempt=2, index=1)],
        [JOINED, ("start", started(attempt=2)), ("start", started(attempt=2, index=1))],
    ),
    "a deposed conductor resumes nothing": (
        [joined(), ready(), opened(2), resumed(2)],
        [JOINED, ("start", started())],
    ),
    "a life that is over is parted from, once": (
        [joined(), joined("w1.joined.x", rank=1), lost(AT + 1, rank=1), lost(AT + 1, rank=1)],
        [JOINED, ("met", (1, AT + 1)), ("parted", (1, AT + 1))],
    ),
    "leaving is nobody's order": ([joined(), WorkerLeaving(id="x", rank=0, incarnation=AT)], [JOINED]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_inbox(case: str) -> None:
    events, expected = CASES[case]

    assert briefly(fold(events)) == expected


def test_the_incarnation_is_the_position_of_the_first_copy() -> None:
    inbox = inbox_of()

    fold([opened(1), joined(), joined()], inbox)

    assert inbox.incarnation == Incarnation(AT + 1)


def test_the_epoch_known_from_before_fences_at_once() -> None:
    inbox = inbox_of(epoch=5)

    assert briefly(fold([joined(), ready(epoch=4), ready(epoch=5)], inbox)) == [JOINED, ("start", started())]


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        (SUBJECTS.ready(0, "r"), b"\x00garbage"),
        (SUBJECTS.ready(0, "r"), encode(joined())),
        (SUBJECTS.worker(0), encode(ready())),
        (SUBJECTS.request("r"), encode(RequestSubmitted(model="m", inputs={"text": "x"}))),  # type: ignore[arg-type] # what clients write
        ("elsewhere.x", encode(joined())),
    ],
)
def test_what_cannot_be_read_changes_nothing_and_is_told(subject: str, data: bytes) -> None:
    inbox = inbox_of()

    action = inbox.fold(StoredRecord(seq=7, subject=subject, data=data, time_ns=0))

    assert isinstance(action, Unreadable)
    assert "record 7" in action.note
    assert inbox.incarnation is None


def test_only_so_many_requests_are_remembered_the_latest() -> None:
    inbox = inbox_of(remembered=2)
    fold([joined(), ready("a"), ready("b"), ready("a", index=1), ready("c")], inbox)

    assert briefly(fold([ready("a"), ready("c"), ready("b")], inbox)) == [("start", started("b"))]


def test_early_edges_that_find_no_room_are_told_with_their_order() -> None:
    inbox = inbox_of(out_of_order=OutOfOrderBuffer(max_per_request=2))
    [_, start] = fold([joined(), fired(), sent(0), sent(1), ready(lives=LIVES)], inbox)

    assert isinstance(start, StartOrder)
    assert "3 edges" in start.refused
    assert start.edges == ()
    [start] = fold([ready(attempt=2, lives=LIVES)], inbox)
    assert isinstance(start, StartOrder)
    assert not start.refused


@pytest.mark.parametrize(("rank", "life"), [(9, 600), (9, None), (1, THEIRS - 1), (1, THEIRS + 1), (1, None)])
def test_edges_of_a_rank_or_life_that_has_not_joined_are_not_even_kept(rank: int, life: int | None) -> None:
    early = OutOfOrderBuffer()
    inbox = inbox_of(out_of_order=early)
    fold([joined()], inbox)
    for request_id in ("r", "another"):
        edge = msgspec.structs.replace(fired(), writer=f"w{rank}", incarnation=life, request_id=request_id)
        assert inbox.fold(StoredRecord(2000, SUBJECTS.edge(0, rank, request_id), encode(edge), 1)) is None
    assert early.count == 0


def test_edges_of_a_rank_in_the_order_count_although_its_join_has_expired() -> None:
    inbox = inbox_of(peers=PeerIncarnations())
    fold([joined(), ready(lives=LIVES)], inbox)
    assert fold([fired()], inbox) == [ReceivedEdge(fired(), 1)]


def test_a_rank_without_a_part_in_the_order_neither_reaches_it_nor_takes_its_room() -> None:
    """Rank 9 has joined, as any holder of its key can; the request is placed on the ranks 0 and 1."""
    inbox = inbox_of(out_of_order=OutOfOrderBuffer(max_per_request=2))
    fold([joined(), joined("w9.joined", rank=9)], inbox)
    life = inbox._peers.current[9].incarnation
    for number in range(5):
        edge = msgspec.structs.replace(fired(), id=str(number), writer="w9", incarnation=life)
        assert inbox.fold(StoredRecord(3000 + number, SUBJECTS.edge(0, 9, "r"), encode(edge), 1)) is None
    [start] = fold([fired(), ready(lives=LIVES)], inbox)

    assert isinstance(start, StartOrder)
    assert start.refused == ""
    assert [(edge.rank, edge.event) for edge in start.edges] == [(1, fired())]


def test_an_attempt_that_is_over_leaves_no_early_edges() -> None:
    early = OutOfOrderBuffer()
    inbox = inbox_of(out_of_order=early)
    fold([joined(), ready(lives=LIVES), fired(1), fired(2), fired(1, attempt=2)], inbox)
    assert early.count == 3
    fold([stop(), fired(3)], inbox)
    assert early.count == 1
    fold([resumed(3)], inbox)

    assert (early.count, early.nbytes) == (0, 0)


def test_what_was_told_to_an_earlier_life_is_not_waited_for() -> None:
    early = OutOfOrderBuffer()
    inbox = inbox_of(out_of_order=early)
    to_us, to_no_longer = (msgspec.structs.replace(fired(), to_life=life) for life in (AT, AT - 7))
    fold([joined(), to_no_longer], inbox)
    assert early.count == 0
    [start] = fold([to_us, ready(lives=LIVES)], inbox)

    assert isinstance(start, StartOrder)
    assert [heard.event for heard in start.edges] == [to_us]


def test_an_edge_for_another_rank_or_of_another_request_is_nothing_to_read() -> None:
    inbox = inbox_of()
    for subject in (SUBJECTS.edge(2, 1, "r"), SUBJECTS.edge(0, 1, "q")):
        action = inbox.fold(StoredRecord(seq=7, subject=subject, data=encode(fired()), time_ns=0))

        assert isinstance(action, Unreadable)
