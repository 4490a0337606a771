"""The checker can fail: every falsification, in a transcript or on the log, is found and named."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import pytest

from tests.chaos.checker import Expected, Stream, check
from tests.chaos.deployment import Deployment
from tests.chaos.ledger import Ledger
from tests.chaos.questions import CANCELLED, GREEDY, LEAVER, TWO, WHOLE, Question
from tests.chaos.rawlog import Record
from tests.chaos.seen import Piece, Seen

ID: Final = "r1"
USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
Events: TypeAlias = list[tuple[str, dict[str, Any]]]


LIVES: Final = {1: 11, 2: 22}
"""By attempt, the incarnation of the rank that executes it: rank 0, then rank 1."""


def chunk(index: int, attempt: int = 1, *, request_id: str = ID, text: str | None = None) -> dict[str, Any]:
    """The chunk of an index: two tokens and three letters each."""
    return {
        "type": "output.chunk.v1",
        "id": f"{request_id}.out.{attempt}.{index}",
        "writer": "w0",
        "request_id": request_id,
        "attempt": attempt,
        "incarnation": LIVES[attempt],
        "index": index,
        "text": f"<{index}>" if text is None else text,
        "text_offset": 3 * index,
        "token_ids": [10 * index, 10 * index + 1],
        "token_offset": 2 * index,
    }


def decided(kind: str, epoch: int = 1, *, request_id: str = ID, **said: Any) -> dict[str, Any]:
    found = {
        "type": f"request.{kind}.v1",
        "id": f"{request_id}.{kind}",
        "writer": "conductor",
        "epoch": epoch,
    }
    return {**found, "request_id": request_id, **said}


def ordered(rank: int, attempt: int, request_id: str = ID) -> tuple[str, dict[str, Any]]:
    """The order to a rank to execute an attempt."""
    said = {"type": "node.ready.v1", "id": f"{request_id}.ready.{attempt}.0.{rank}", "rank": rank}
    about = {"attempt": attempt, "incarnation": LIVES[attempt], "writer": "conductor", "epoch": attempt}
    return f"ds.ready.{rank}.{request_id}", {**said, **about}


def history(request_id: str = ID) -> Events:
    """A request whose conductor and worker both died: four valid chunks, and void ones."""
    output = f"ds.output.g-1.{request_id}"
    fence = {"type": "output.fence.v1", "id": f"{request_id}.fence.2", "writer": "conductor", "epoch": 2}
    admitted: dict[str, Any] = {"seed": 7, "placement": {"prepare": 0, "llm": 0}, "lives": {"w0": LIVES[1]}}
    resumed: dict[str, Any] = {"placement": {"prepare": 1, "llm": 1}, "lives": {"w1": LIVES[2]}}
    return [
        ("ds.conductor.epoch", {"type": "epoch.opened.v1", "writer": "conductor", "epoch": 1}),
        (
            f"ds.request.{request_id}",
            {"type": "request.submitted.v1", "id": f"g-1.{request_id}", "request_id": request_id},
        ),
        (f"ds.walk.{request_id}", decided("admitted", request_id=request_id, **admitted)),
        ordered(0, 1, request_id),
        (f"{output}.w0", chunk(0, request_id=request_id)),
        (f"{output}.w0", chunk(1, request_id=request_id)),
        ("ds.conductor.epoch", {"type": "epoch.opened.v1", "writer": "conductor", "epoch": 2}),
        (f"ds.walk.{request_id}", decided("admitted", 2, request_id=request_id, **admitted)),
        (f"ds.walk.{request_id}", decided("failed", 1, request_id=request_id)),  # deposed
        (f"ds.walk.{request_id}", decided("resumed", 2, request_id=request_id, **resumed)),
        (f"{output}.conductor", {**fence, "request_id": request_id, "attempt": 2}),
        ordered(1, 2, request_id),
        (f"{output}.w0", chunk(2, request_id=request_id, text="zzz")),  # a zombie's
        (f"{output}.w1", chunk(3, 2, request_id=request_id)),  # early
        (f"{output}.w1", chunk(2, 2, request_id=request_id)),
        (f"{output}.w1", chunk(2, 2, request_id=request_id)),  # stored twice
        (f"ds.done.1.{request_id}", {"type": "walk.completed.v1", "id": f"{request_id}.done.2.1.1"}),
        (
            f"ds.walk.{request_id}",
            decided(
                "finished",
                2,
                request_id=request_id,
                finish_reasons=["length"],
                usage={"prompt_tokens": 3, "completion_tokens": 8},
                output={"chunks": 4, "digest": "0"},
            ),
        ),
    ]


def records(events: Events) -> list[Record]:
    return [
        Record(seq, subject, msgspec.msgpack.encode(event)) for seq, (subject, event) in enumerate(events, 1)
    ]


def seen(question: Question = GREEDY, pieces: list[Piece] | None = None) -> Seen:
    """What a client received that resumed once."""
    told = [
        Piece(index=index, text=f"<{index}>", token_ids=(10 * index, 10 * index + 1)) for index in range(4)
    ]
    one = Seen(ID, question, pieces=pieces or [*told, Piece(finish_reason="length")])
    one.usages, one.completions, one.resumed = [USAGE], 1, 1
    return one


def kinds(events: Events, *clients: Seen, expected: dict[str, Expected] | None = None) -> set[str]:
    return {finding.kind for finding in check(records(events), clients, expected)}


def test_what_is_right_is_found_right() -> None:
    assert kinds(history(), seen()) == set()
    assert kinds(history(), seen(), expected=undisturbed()) == set()


def undisturbed() -> dict[str, Expected]:
    return {GREEDY.name: Expected.of(seen(), Stream(records(history())))}


# ---- transcripts ---------------------------------------------------------------------------------------


def changed(place: int, **changes: Any) -> Callable[[list[Piece]], list[Piece]]:
    def change(pieces: list[Piece]) -> list[Piece]:
        return [replace(piece, **changes) if at == place else piece for at, piece in enumerate(pieces)]

    return change


@pytest.mark.parametrize(
    ("falsify", "named"),
    [
        (lambda told: [*told[:2], told[1], *told[2:]], "twice"),
        (lambda told: [*told[:1], *told[2:]], "missing"),
        (lambda told: [told[1], told[0], *told[2:]], "order"),
        (lambda told: told[:-2] + told[-1:], "missing"),
        (lambda told: told[:-1], "end-missing"),
        (lambda told: [*told, told[-1]], "end-twice"),
        (lambda told: [*told[:3], told[4], told[3]], "behind-the-end"),
        (lambda told: [*told[:4], replace(told[3], index=4), told[4]], "invented"),
        (lambda told: [*told[:3], Piece(text="!"), *told[3:]], "unnamed"),
        (changed(2, text="<x>"), "altered"),
        (changed(2, data=b"!"), "altered"),
        (changed(2, token_ids=(20, 22)), "altered"),
        (changed(2, logprobs=(-0.5, -0.5)), "altered"),
        (changed(4, finish_reason="stop"), "altered"),
    ],
)
def test_what_a_client_was_told_wrongly_is_named(
    falsify: Callable[[list[Piece]], list[Piece]], named: str
) -> None:
    assert named in kinds(history(), seen(pieces=falsify(seen().pieces)))


def test_a_zombies_chunk_that_reached_the_client_is_named() -> None:
    assert kinds(history(), seen(pieces=changed(2, text="zzz")(seen().pieces))) == {"altered"}


def test_a_client_without_an_answer_is_a_lost_request() -> None:
    one = seen(pieces=seen().pieces[:2])
    one.gave_up = "no end within 90 s"
    [finding] = check(records(history()), [one])
    assert finding.kind == "lost"


@pytest.mark.parametrize(
    ("usages", "completions", "named"),
    [([], 1, "usage"), ([USAGE, USAGE], 1, "usage"), ([USAGE], 0, "completed"), ([USAGE], 2, "completed")],
)
def test_a_last_word_that_is_missing_or_said_twice_is_named(
    usages: list[dict[str, int]], completions: int, named: str
) -> None:
    one = seen()
    one.usages, one.completions = usages, completions
    assert kinds(history(), one) == {named}


def test_of_what_a_client_did_not_wait_for_nothing_is_missing_but_a_hole_is_one() -> None:
    left = seen(LEAVER, seen().pieces[:2])
    left.left = True
    assert kinds(history(), left) == set()
    left.pieces = [left.pieces[1], left.pieces[0]]
    assert kinds(history(), left) == {"order"}


def test_a_document_is_held_against_the_whole_answer() -> None:
    whole, *_ = WHOLE
    text = "<0><1><2><3>"
    told = [Piece(text=text, finish_reason="length")]
    expected = {whole.name: Expected.of(seen(whole, told), Stream(records(history())))}

    assert kinds(history(), seen(whole, told), expected=expected) == set()
    assert kinds(history(), seen(whole, [replace(told[0], text=text[:-3])])) == {"altered"}
    other = [replace(told[0], text='[{"name": "call"}]')]
    assert kinds(history(), seen(whole, other), expected=expected) == {"differs"}


def test_a_cancel_that_was_confirmed_has_to_be_the_end() -> None:
    confirmed = seen(CANCELLED)
    confirmed.is_cancelled, confirmed.gave_up = True, "410 request_cancelled: another client"
    end = (history()[END][0], decided("cancelled", 2, reason="cancelled"))

    assert kinds([*history()[:END], end], confirmed) == set()
    assert kinds(history(), confirmed) == {"ended-otherwise"}
    assert kinds(history(), seen(CANCELLED)) == set()  # nobody confirmed it


def test_each_choice_is_held_against_a_request_of_its_own() -> None:
    pieces = [replace(piece, choice=choice) for choice in (0, 1) for piece in seen().pieces]
    both = [event for pair in zip(history(), history(f"{ID}-1"), strict=True) for event in pair]
    assert kinds(both, seen(TWO, pieces)) == set()
    assert kinds(history(), seen(TWO, pieces)) == {"not-on-the-log"}


def test_what_differs_from_an_undisturbed_run_is_named() -> None:
    [expected] = undisturbed().values()
    others = [
        replace(expected, texts=("<0><1><2><4>",)),
        replace(expected, data=(b"!",)),
        replace(expected, token_ids=((0, 1, 10, 11, 20, 21, 30, 32),)),
        replace(expected, finish_reasons=("stop",)),
    ]
    for other in others:
        assert kinds(history(), seen(), expected={GREEDY.name: other}) == {"differs"}
    other = replace(expected, usage={**USAGE, "prompt_tokens": 4})
    assert kinds(history(), seen(), expected={GREEDY.name: other}) == {"usage"}
    other = replace(expected, logprobs=((-1.0,),))
    assert kinds(history(), seen(), expected={GREEDY.name: other}) == {"logprobs"}


def test_tracks_that_are_written_side_by_side_are_told_in_the_order_of_the_log() -> None:
    def sound(track: str, index: int, data: bytes) -> tuple[str, dict[str, Any]]:
        said = {**chunk(index), "id": f"{track}.{index}", "text": "", "text_offset": 0, "token_ids": []}
        return "ds.output.g-1.r1.w0", {**said, "token_offset": 0, "track": track, "data": data}

    spoken = [
        sound("left", 0, b"a"),
        sound("right", 0, b"b"),
        sound("left", 1, b"c"),
        sound("right", 1, b"d"),
    ]
    events = [*history()[: ORDER + 1], *spoken, history()[END]]
    events[-1] = (events[-1][0], {**events[-1][1], "epoch": 1, "usage": {}})
    told = [Piece(index=index, data=bytes([97 + index])) for index in range(4)]
    end = Piece(finish_reason="length")

    assert kinds(events, seen(pieces=[*told, end])) == set()
    assert kinds(events, seen(pieces=[told[1], told[0], *told[2:], end])) == {"order"}
    assert kinds(events, seen(pieces=[*told[:2], replace(told[2], data=b"x"), told[3], end])) == {"altered"}


# ---- the log -------------------------------------------------------------------------------------------


def without(*places: int) -> Callable[[Events], Events]:
    return lambda events: [one for place, one in enumerate(events) if place not in places]


def with_(place: int, **changes: Any) -> Callable[[Events], Events]:
    def change(events: Events) -> Events:
        return [
            (name, {**said, **changes}) if at == place else (name, said)
            for at, (name, said) in enumerate(events)
        ]

    return change


ORDER: Final = 3
SECOND_CHUNK: Final = 5
ADMITTED_AGAIN: Final = 7
DEPOSED: Final = 8
RESUMED: Final = 9
FENCE: Final = 10
ZOMBIE: Final = 12
LAST_CHUNK: Final = 14
COPY: Final = 15
END: Final = 17
"""The places of its events in `history`."""


@pytest.mark.parametrize(
    ("falsify", "named"),
    [
        (without(END), "no-end"),
        (lambda events: [*events, (events[END][0], {**events[END][1], "id": "another"})], "two-ends"),
        (lambda events: [*events, (events[DEPOSED][0], {**events[DEPOSED][1], "epoch": 2})], "two-ends"),
        (without(1), "never-submitted"),
        (lambda events: [*events[:2], *events[1:]], "submitted-twice"),
        (lambda events: [*events, ("ds.output.g-1.r1.w1", chunk(4, 2))], "behind-the-end"),
        (with_(LAST_CHUNK, token_offset=5), "offset"),
        (with_(LAST_CHUNK, text_offset=5), "offset"),
        (with_(END, usage={"completion_tokens": 9}), "usage"),
        (with_(END, output={"chunks": 5}), "chunk-count"),
        (with_(ADMITTED_AGAIN, seed=8), "contradiction"),
        (with_(COPY, text="<x>"), "contradiction"),
        (without(RESUMED, FENCE), "altered"),  # without them, the zombie's chunk counts
        (without(SECOND_CHUNK), "invented"),
        (without(SECOND_CHUNK), "chunk-count"),
        (with_(ORDER, incarnation=7), "unordered"),
    ],
)
def test_what_is_wrong_on_the_log_is_named(falsify: Callable[[Events], Events], named: str) -> None:
    assert named in kinds(falsify(history()), seen())


OUTPUT: Final = "ds.output.g-1.r1"
FORGED: Final = {**chunk(2, text="<x>"), "id": "forged"}


@pytest.mark.parametrize(
    "stranger",
    [
        (f"{OUTPUT}.w1", {**FORGED, "incarnation": LIVES[2]}),
        (f"{OUTPUT}.w9", FORGED),
        (f"{OUTPUT}.w0", {**FORGED, "incarnation": 10}),
        (f"{OUTPUT}.w0", {name: value for name, value in FORGED.items() if name != "incarnation"}),
        (f"{OUTPUT}.conductor", FORGED),
        ("ds.done.0.r1", FORGED),
        (f"{OUTPUT}.w1", {"type": "output.fence.v1", "id": "f", "writer": "w1", "attempt": 9}),
        (f"{OUTPUT}.w1", {**decided("failed"), "writer": "w1"}),
        ("ds.done.1.r1", {**decided("resumed", placement={"llm": 1}), "writer": "w1"}),
        ("ds.worker.1", {"type": "epoch.opened.v1", "writer": "conductor", "epoch": 9}),
    ],
)
def test_what_a_stranger_says_does_not_count(stranger: tuple[str, dict[str, Any]]) -> None:
    events = history()
    assert kinds([*events[: SECOND_CHUNK + 1], stranger, *events[SECOND_CHUNK + 1 :]], seen()) == set()


def test_what_comes_after_the_end_of_a_failed_request_does_not_count() -> None:
    end = (history()[END][0], decided("failed", 2, failure={"code": "worker_lost"}))
    stream = Stream(records([*history()[:END], end, (f"{OUTPUT}.w1", {**chunk(4, 2), "id": "late"})]))
    assert len(stream.requests[ID].chunks) == 4


def test_a_copy_may_differ_in_who_published_it_and_when() -> None:
    events = with_(ADMITTED_AGAIN, number=17, trace="00-1-2-01")(history())
    assert kinds(events, seen()) == set()


def test_what_is_no_event_is_nobodys_fault() -> None:
    noise = [Record(99, "ds.request.r9", b"\xc1"), Record(100, "ds.request.r9", b"{")]
    assert {one.kind for one in check([*records(history()), *noise], [seen()])} == set()


# ---- processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beat", "held"),
    [
        ({"state": "ready", "running": 0, "kv_used": 0, "meters": {"tensors": {"slots": 0}}}, None),
        ({"state": "ready", "running": 1}, "{'running': 1}"),
        ({"state": "ready", "kv_used": 16}, "{'kv_used': 16}"),
        ({"state": "ready", "meters": {"tensors": {"slots": 3}}}, "{'slots': 3}"),
        ({"state": "leading", "open": 2}, "{'open': 2}"),
        ({"state": "loading", "running": 1}, None),
    ],
)
async def test_what_is_still_held_is_named(beat: dict[str, Any], held: str | None) -> None:
    nobody: Any = None
    soon_s = time.monotonic() + 60
    deployment = Deployment(Path(), nobody, nobody, {}, Ledger(), {"ds.beat.worker.0": (beat, soon_s)})

    found = await deployment.leftovers(0.0)
    assert found == ([] if held is None else [f"ds.beat.worker.0 holds {held}"])
