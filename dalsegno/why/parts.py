"""The parts of the time of one attempt of a step, from the recorded work of its nodes. Pure.

A part has a kind, a duration, and words that name its cause. The parts of a step add up to its duration: what
no node accounts for is the way through the log, and waiting for other ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from dalsegno.why.request_facts import Order, Step
from shared.events import NodeWork, WalkCompleted

NS: Final = 1_000_000_000


class Kind(StrEnum):
    """What a request does, or waits for, in a part of its time."""

    ADMISSION = "admission"
    """It waits for the conductor to admit it."""
    CONDUCTOR = "conductor"
    """The conductor decides, and the log stores."""
    NO_CONDUCTOR = "no_conductor"
    """No conductor leads."""
    QUEUE = "queue"
    """A sequence or a call waits for a place in its engine."""
    PREFILL = "prefill"
    """Its prompt is computed, up to the first token."""
    DECODE = "decode"
    """Its tokens are computed."""
    NEIGHBOURS = "neighbours"
    """Its tokens are computed in steps that compute prompts of other requests too."""
    PREEMPTED = "preempted"
    """Its sequence has given its KV blocks to another one."""
    HELD = "held"
    """Its sequence is held, because the log or a stream takes no more of its output."""
    NODE = "node"
    """A node computes that is no language model."""
    STREAM = "stream"
    """A step waits for items of a stream."""
    TRANSIT = "transit"
    """Orders, reports and output pass through the log; other ranks compute."""
    LOST = "lost"
    """An attempt computes what a later one has to compute again, or goes on from."""
    SILENT = "silent"
    """A worker is dead, and nobody knows yet."""
    AWAY = "away"
    """A rank is away: its process starts, and loads the model."""
    RUNNING = "running"
    """A step has not reported yet."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a request's time.

    Attributes:
        begin_ns, end_ns: from the submission.
        text: the cause, in words.
        rank, step, attempt, node: where, if it belongs to a step.
        requests: the other requests that caused it.
    """

    kind: Kind
    begin_ns: int
    end_ns: int
    text: str
    rank: int | None = None
    step: int | None = None
    attempt: int | None = None
    node: str | None = None
    requests: list[str] = []

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


class _Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step before it has its place in time."""

    kind: Kind
    seconds: float
    text: str
    rank: int
    node: str | None = None
    requests: Sequence[str] = ()


def parts_of_step(step: Step, begin_ns: int, end_ns: int, producers: Mapping[str, Step]) -> Iterator[Part]:
    """Yield the parts of a step between two times, both from the submission; they follow one another.

    Args:
        step: the step.
        begin_ns: the time of its first order.
        end_ns: the time of its end, or of the end of the time that it is critical for.
        producers: by stream, the concurrent step whose node makes its items.
    """
    total_s = (end_ns - begin_ns) / NS
    pieces = [*_pieces(step, total_s)]
    spent_s = sum(piece.seconds for piece in pieces)
    if producers and total_s > spent_s:
        pieces = [*_waits_for_producers(producers, total_s - spent_s), *pieces]
        spent_s = sum(piece.seconds for piece in pieces)
    rest_s = total_s - spent_s
    if rest_s < 0:  # nodes of several ranks compute at the same time
        pieces = [msgspec.structs.replace(one, seconds=one.seconds * total_s / spent_s) for one in pieces]
    yield from _placed(step, pieces, begin_ns, end_ns)


def _placed(step: Step, pieces: Sequence[_Piece], begin_ns: int, end_ns: int) -> Iterator[Part]:
    """Give the pieces their places, one after the other; the rest is the way through the log."""
    at_ns = begin_ns
    for piece in pieces:
        until_ns = min(end_ns, at_ns + round(piece.seconds * NS))
        if until_ns > at_ns:
            yield Part(
                kind=piece.kind,
                begin_ns=at_ns,
                end_ns=until_ns,
                text=piece.text,
                rank=piece.rank,
                step=step.index,
                attempt=step.attempt,
                node=piece.node,
                requests=list(piece.requests),
            )
        at_ns = until_ns
    if at_ns < end_ns:
        ranks = " and ".join(map(str, sorted(step.orders)))
        yield Part(
            kind=Kind.TRANSIT,
            begin_ns=at_ns,
            end_ns=end_ns,
            text=f"order to rank {ranks}, output and report, through the log",
            step=step.index,
            attempt=step.attempt,
        )


def _pieces(step: Step, total_s: float) -> Iterator[_Piece]:
    orders = sorted(step.orders.values(), key=lambda order: order.report_seq or order.seq)
    if not any(order.work for order in orders):
        yield from _of_durations(orders)
        return
    if sum(work.took_s for order in orders for work in order.work.values()) > total_s:
        orders = orders[-1:]  # ranks compute at the same time: the last to report decides
    for order in orders:
        for node, work in order.work.items():
            for piece in _of_node(node, work, order):
                yield msgspec.structs.replace(piece, node=node)


def _of_durations(orders: Sequence[Order]) -> Iterator[_Piece]:
    """The durations of walks: all that logs have which are older than the work of nodes."""
    last = next((order for order in reversed(orders) if isinstance(order.report, WalkCompleted)), None)
    if last is None:
        return
    assert isinstance(last.report, WalkCompleted)
    for walk, seconds in last.report.durations_s.items():
        yield _Piece(kind=Kind.NODE, seconds=seconds, text=f"walk {walk}", rank=last.ready.rank)


def _of_node(node: str, work: NodeWork, order: Order) -> Iterator[_Piece]:
    rank = order.ready.rank
    on = f"{node} on rank {rank}"
    if work.waited_s:
        yield _Piece(
            kind=Kind.QUEUE,
            seconds=work.waited_s,
            text=f"{on} waited {_lack(work)}",
            rank=rank,
            requests=work.behind,
        )
    if work.first_token_s or work.preemption_count or work.held_s:
        yield from _of_sequence(on, work, order)
        return
    text = f"{on} computed{_times(work)}"
    yield _Piece(kind=Kind.NODE, seconds=max(0.0, work.took_s - work.waited_s), text=text, rank=rank)


def _of_sequence(on: str, work: NodeWork, order: Order) -> Iterator[_Piece]:
    rank = order.ready.rank
    first_s = work.first_token_s or work.took_s
    early_s = sum(one.waited_s for one in work.preemptions if one.at_s < first_s)
    late_s = work.preempted_s - early_s
    held_s = 0.0 if work.first_token_s else work.held_s
    prefill_s = max(0.0, first_s - work.waited_s - early_s - held_s)
    decode_s = max(0.0, work.took_s - max(first_s, work.waited_s) - late_s - work.held_s)
    beside_s = min(work.beside_s, decode_s) if work.beside else 0.0
    cached = f", with {work.cached_tokens:,} cached tokens" if work.cached_tokens else ""
    came = f"{on} computed up to its first token{cached}"
    if not work.first_token_s:
        came = f"{on} computed, and had no first token yet"
    yield _Piece(kind=Kind.PREFILL, seconds=prefill_s, text=came, rank=rank)
    yield from _preemptions(on, work, rank)
    if beside_s:
        yield _Piece(
            kind=Kind.NEIGHBOURS,
            seconds=beside_s,
            text=f"{on} decoded beside the prompts of {_beside(work)}",
            rank=rank,
            requests=list(work.beside),
        )
    yield _Piece(kind=Kind.DECODE, seconds=decode_s - beside_s, text=f"{on} decoded{_steps(work)}", rank=rank)
    if work.held_s:
        text = f"{on} was held: it waited for items of a stream, or for room for its output"
        yield _Piece(kind=Kind.HELD, seconds=work.held_s, text=text, rank=rank)


def _preemptions(on: str, work: NodeWork, rank: int) -> Iterator[_Piece]:
    for one in work.preemptions:
        again = f", {one.tokens:,} tokens computed again" if one.tokens else ""
        yield _Piece(
            kind=Kind.PREEMPTED,
            seconds=one.waited_s,
            text=f"{on} was preempted by {one.by or 'another request'}{again}",
            rank=rank,
            requests=[one.by] if one.by else [],
        )
    others = work.preemption_count - len(work.preemptions)
    if others > 0:
        seconds = max(0.0, work.preempted_s - sum(one.waited_s for one in work.preemptions))
        times = "once more" if others == 1 else f"{others:,} times more"
        yield _Piece(kind=Kind.PREEMPTED, seconds=seconds, text=f"{on} was preempted {times}", rank=rank)


def _waits_for_producers(producers: Mapping[str, Step], idle_s: float) -> Iterator[_Piece]:
    """What a step that takes items of streams waited for: the parts of the steps that make them, in order."""
    for stream, producer in producers.items():
        for order in producer.orders.values():
            for node, work in order.work.items():
                for piece in _of_node(node, work, order):
                    seconds = min(piece.seconds, idle_s)
                    idle_s -= seconds
                    if seconds:
                        text = f"{piece.text} (for stream {stream})"
                        yield msgspec.structs.replace(piece, seconds=seconds, text=text)


def _lack(work: NodeWork) -> str:
    what = {
        "places": "for a place in the batch",
        "kv_blocks": "for KV blocks",
        "prefix": "for a prefix that another request was computing",
        "": "to be taken up",
    }[work.lacked]
    if not work.behind:
        return what
    names = named(work.behind, work.behind_count)
    if work.lacked == "prefix":
        return f"for the prefix that {names} was computing"
    return f"{what} behind {names}"


def _times(work: NodeWork) -> str:
    calls = f" in {work.calls:,} calls" if work.calls > 1 else ""
    steps = f", {work.steps:,} steps" if work.steps > work.calls else ""
    rows = f", {work.rows:g} together" if work.rows > 1 else ""
    return f"{calls}{steps}{rows}"


def _steps(work: NodeWork) -> str:
    rows = f", {work.rows:g} sequences together" if work.rows > 1 else ""
    drafts = f", {work.accepted:,} of {work.drafted:,} drafted tokens accepted" if work.drafted else ""
    return f" over {work.steps:,} engine steps{rows}{drafts}"


def _beside(work: NodeWork) -> str:
    return ", ".join(f"{request} ({tokens:,} tokens)" for request, tokens in work.beside.items())


def named(requests: Sequence[str], count: int = 0) -> str:
    """Return a list of requests in words: `r8, r9 and 3 others`."""
    others = max(count - len(requests), 0)
    names = [*requests, *([f"{others} other{'s' if others > 1 else ''}"] if others else [])]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "others"
