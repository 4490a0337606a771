"""The writers of a request's output, and their time, by the rules of `docs/nats.md`."""

import msgspec
import pytest

from shared.events import AnyEvent, OutputChunk, OutputFence, RequestCancelled, RequestResumed
from shared.request_output import RequestOutput
from shared.subjects import Subjects
from shared.transcript import Transcript
from tests.admissions import admitted

SUBJECTS = Subjects()
CANCELLED = RequestCancelled(request_id="r", reason="left", history=b"")
OLD = admitted("r", {"w0": 10})


def chunk(index: int, life: int | None = 10, attempt: int = 1, text: str = "x") -> OutputChunk:
    return OutputChunk(
        id=f"{life}.{attempt}.{index}",
        request_id="r",
        attempt=attempt,
        incarnation=life,
        index=index,
        text=text,
    )


def fence(attempt: int) -> OutputFence:
    return OutputFence(request_id="r", attempt=attempt, reason="", history=b"")


def resumed(lives: dict[str, int], index: int = 0, attempt: int = 2) -> RequestResumed:
    return RequestResumed(
        id=f"r.resumed.{index}",
        request_id="r",
        attempt=attempt,
        index=index,
        placement={},
        lives=lives,
        reason="",
    )


def told(output: RequestOutput, *events: tuple[str, AnyEvent] | AnyEvent) -> str:
    """Fold events, chunks as by `w0` unless another writer is named; return the text that became valid."""
    text = ""
    for one in events:
        writer, event = one if isinstance(one, tuple) else ("w0", one)
        address = SUBJECTS.parse(SUBJECTS.output("g", "r", writer))
        assert address is not None
        text += "".join(valid.text for valid in output.fold(address, event))
    return text


def test_the_ordered_incarnation_of_a_placed_rank_writes() -> None:
    output = RequestOutput()
    assert told(output, OLD, chunk(0, text="a"), chunk(1, text="b")) == "ab"
    assert output.objections == {}


@pytest.mark.parametrize(
    ("writer", "life", "reason"),
    [
        ("w1", 10, "w1: a writer without an order; the request is placed on w0"),
        ("w9", None, "w9: a writer without an order; the request is placed on w0"),
        ("w0", 9, "w0: written by incarnation 9; incarnation 10 has the order"),
        ("w0", 11, "w0: written by incarnation 11; incarnation 10 has the order"),
        ("w0", None, "w0: written by incarnation None; incarnation 10 has the order"),
        ("conductor", 10, "conductor: a writer without an order; the request is placed on w0"),
    ],
)
def test_anyone_else_does_not_and_is_named_once(writer: str, life: int | None, reason: str) -> None:
    output = RequestOutput()
    forged = [(writer, chunk(index, life, attempt, "FORGED")) for index in (0, 1) for attempt in (1, 99)]
    assert told(output, OLD, *forged, chunk(0, text="a"), *forged, chunk(1, text="b")) == "ab"
    assert {str(one): count for one, count in output.objections.items()} == {reason: 8}
    alone = RequestOutput()
    told(alone, OLD, chunk(0, text="a"), chunk(1, text="b"))
    assert output.transcript.totals == alone.transcript.totals


def test_nothing_is_written_before_the_admission_or_after_the_end() -> None:
    output = RequestOutput()
    assert (
        told(output, chunk(0, text="early"), OLD, chunk(0, text="a"), CANCELLED, chunk(1, text="late")) == "a"
    )
    assert [one.reason for one in output.objections] == ["the request is not admitted"]


def test_after_a_death_the_successor_writes_and_the_old_life_no_more() -> None:
    output = RequestOutput()
    zombie = chunk(1, 10, attempt=1, text="zombie"), chunk(1, 10, attempt=2, text="zombie")
    successor = chunk(1, 20, attempt=2, text="b")
    assert (
        told(output, OLD, chunk(0, text="a"), fence(2), *zombie, resumed({"w0": 20}), *zombie, successor)
        == "ab"
    )
    assert [one.reason for one in output.objections] == [  # its late chunks of the first attempt are normal
        "the request is held: nobody has an order",
        "written by incarnation 10; incarnation 20 has the order",
    ]


def test_a_request_that_goes_on_at_once_is_written_by_those_that_its_fence_names() -> None:
    """A tensor was lost: its ranks are alive, so the next attempt needs no resumption."""
    output = RequestOutput()
    again = msgspec.structs.replace(fence(2), lives={"w0": 10})
    assert told(output, OLD, chunk(0, text="a"), again, chunk(1, 10, 1, "late"), chunk(1, 10, 2, "b")) == "ab"


def test_a_fence_that_is_stored_after_its_resumption_takes_nothing_back() -> None:
    output = RequestOutput()
    events = (
        OLD,
        resumed({"w0": 20}),
        chunk(0, 10, 1, "late"),
        chunk(0, 20, 2, "a"),
        fence(2),
        chunk(1, 20, 2, "b"),
    )
    assert told(output, *events) == "ab"


def test_fences_of_logs_without_lives_leave_the_ranks_as_they_are() -> None:
    assert told(RequestOutput(), admitted("r"), fence(2), chunk(0, 10, 2, "a")) == "a"


def test_a_request_that_moved_is_written_by_its_new_rank_alone() -> None:
    output = RequestOutput()
    assert told(output, OLD, chunk(0, text="a"), fence(2), resumed({"w3": 20})) == "a"
    assert (
        told(output, chunk(1, 10, 2, "old"), ("w3", chunk(1, 20, 2, "b")), ("w3", chunk(2, 10, 2, "x")))
        == "b"
    )


def test_a_second_copy_of_a_placement_stored_after_the_next_one_changes_nothing() -> None:
    output = RequestOutput()
    first, second = resumed({"w0": 20}), resumed({"w0": 30}, index=1)
    told(output, OLD, fence(2), first, OLD, second, first, OLD)
    assert told(output, chunk(0, 20, 2, "no"), chunk(0, 30, 2, "yes")) == "yes"


def test_a_request_resumed_in_its_first_attempt_is_written_by_the_resumed_life() -> None:
    """It was held when its admission was stored: its rank had joined again meanwhile."""
    output = RequestOutput()
    told(output, OLD, resumed({"w0": 20}, attempt=1))
    assert told(output, chunk(0, 10, text="no"), chunk(0, 20, text="yes")) == "yes"


def test_logs_without_lives_name_the_ranks_alone() -> None:
    output = RequestOutput()
    old = msgspec.structs.replace(
        admitted("r"), placement={"a": 0}, walk_placement={"walk": {"b": 2}}, lives={}
    )
    assert told(output, old, chunk(0, None, text="a"), ("w2", chunk(1, 7, text="b"))) == "ab"
    assert told(output, ("w1", chunk(2, text="no"))) == ""


def test_objections_are_bounded() -> None:
    output = RequestOutput()
    told(output, OLD, *(chunk(0, life) for life in range(1000, 3000)))
    assert len(output.objections) <= 64


def test_a_track_is_not_a_way_around() -> None:
    output = RequestOutput()
    forged = msgspec.structs.replace(chunk(0, text="FORGED"), track="new")
    assert told(output, OLD, ("w1", forged)) == ""
    assert output.transcript.totals == Transcript().totals


def test_advice_is_seen_from_present_writers_only_and_is_never_part_of_the_output() -> None:
    def is_seen(output: RequestOutput, advice: OutputChunk, writer: str = "w0") -> bool:
        address = SUBJECTS.parse(SUBJECTS.output("g-1", "r1", writer))
        assert address is not None
        assert output.fold(address, advice) == []
        return output.advises(address, advice)

    advice = msgspec.structs.replace(chunk(-1), advisory=True)
    output = RequestOutput()
    assert not is_seen(output, advice)
    told(output, admitted("r1", {"w0": 10}))
    before = output.transcript.totals
    assert is_seen(output, advice)
    assert not is_seen(output, advice, "w1")
    assert not is_seen(output, msgspec.structs.replace(advice, incarnation=11))
    assert not is_seen(output, chunk(5))
    told(output, msgspec.structs.replace(fence(2), lives={"w0": 10}))
    assert not is_seen(output, advice)
    assert is_seen(output, msgspec.structs.replace(advice, attempt=2))
    output.has_ended = True
    assert not is_seen(output, msgspec.structs.replace(advice, attempt=2))
    assert output.transcript.totals == before
