"""The way of a request through the system as lanes of a timeline. Pure; times: seconds from its submission.

critical path   every moment once: what the request computed, or what it waited for
conductor       decisions, with the epochs of conductors
rank            its orders, from the decision to the report; its absences
  node          what the node computed, and what it waited for
stream          items that were sent, and taken
output          chunks of the answer
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from dalsegno.bundle.manifest import event_of
from dalsegno.history.event_description import summary_of, type_of
from dalsegno.replay.recorded_request import History
from dalsegno.studio.media import Answer
from dalsegno.why.parts import NS, Kind, Part, parts_of_step
from dalsegno.why.report import Explanation
from dalsegno.why.request_facts import Order, RequestFacts, Step, Stored
from shared.events import StreamSent, StreamTaken, WalkCompleted, WalkFailed


def lanes_of(one: Explanation, history: History) -> list[dict[str, Any]]:
    """Return the lanes of a request, but for its output."""
    facts = one.facts
    total_ns = max(one.total_ns, 1)
    critical = [_bar(part) for part in one.parts]
    return [
        _lane("critical", "critical path", "critical", critical, []),
        _lane("conductor", "conductor", "conductor", [], [*_marks(facts, history)]),
        *_ranks(facts, total_ns),
        *_streams(facts, history),
    ]


def output_of(answer: Answer, begin_ns: int) -> dict[str, Any]:
    """The chunks of an answer, in columns, and the whole text of each choice.

    `end` of a chunk is the length of the text of its choice up to its end, in UTF-16 units.
    """
    reply, times = answer.reply, answer.times
    texts: dict[int, list[str]] = {}
    columns: dict[str, list[Any]] = {name: [] for name in ("t", "seq", "choice", "track", "end", "tokens")}
    ends: dict[int, int] = {}
    for one in reply.chunks:
        chunk = one.chunk
        if not chunk.is_echo:
            texts.setdefault(chunk.choice, []).append(chunk.text)
            ends[chunk.choice] = ends.get(chunk.choice, 0) + _units(chunk.text)
        columns["t"].append((times[one.seq] - begin_ns) / NS)
        columns["seq"].append(one.seq)
        columns["choice"].append(chunk.choice)
        columns["track"].append(chunk.track)
        columns["end"].append(ends.get(chunk.choice, 0))
        columns["tokens"].append(len(chunk.token_ids))
    return {
        "texts": {str(choice): "".join(parts) for choice, parts in texts.items()},
        "finish_reasons": reply.finish_reasons,
        "usage": None if reply.usage is None else msgspec.to_builtins(reply.usage),
        **columns,
    }


def _units(text: str) -> int:
    """The length of a text as a browser counts it: in UTF-16 units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _lane(
    key: str, label: str, kind: str, bars: list[dict[str, Any]], ticks: list[dict[str, Any]]
) -> dict[str, Any]:
    return {"key": key, "label": label, "kind": kind, "bars": bars, "ticks": ticks}


def _bar(part: Part) -> dict[str, Any]:
    return {
        "from": part.begin_ns / NS,
        "to": part.end_ns / NS,
        "kind": str(part.kind),
        "text": part.text,
        "step": part.step,
        "attempt": part.attempt,
        "requests": part.requests,
    }


# ---- conductor -------------------------------------------------------------------------------------------


def _marks(facts: RequestFacts, history: History) -> Iterator[dict[str, Any]]:
    """The events of the conductor that concern the request, and the submission."""
    for record in history.records:
        address = history.subjects.parse(record.subject)
        if address is None or address.kind not in ("request", "walk", "ready", "conductor", "control"):
            continue
        if address.request_id is not None and address.request_id != facts.request_id:
            continue
        if address.request_id is None and record.time_ns < facts.submitted_ns:
            continue
        event = event_of(record, history.subjects)
        name = type_of(event) if event is not None else "unreadable"
        text = summary_of(event) if event is not None else "this record cannot be read"
        yield _tick(record.seq, record.time_ns - facts.submitted_ns, name, text)


def _tick(seq: int, at_ns: int, name: str, text: str) -> dict[str, Any]:
    return {"at": at_ns / NS, "seq": seq, "kind": name, "text": text}


# ---- ranks -----------------------------------------------------------------------------------------------


def _ranks(facts: RequestFacts, total_ns: int) -> Iterator[dict[str, Any]]:
    ranks = sorted({rank for step in facts.steps.values() for rank in step.orders})
    for rank in ranks:
        orders = [
            (step, step.orders[rank])
            for _, step in sorted(facts.steps.items(), key=lambda item: item[1].first.seq)
            if rank in step.orders
        ]
        bars = [*_absences(facts, rank, total_ns)]
        nodes: dict[str, list[dict[str, Any]]] = {}
        for step, order in orders:
            bars.append(_order_bar(facts, step, order, total_ns))
            for part in _parts(facts, step, order, total_ns):
                nodes.setdefault(part.node or "", []).append(_bar(part) | {"seq": order.seq})
        yield _lane(f"rank {rank}", f"rank {rank}", "rank", bars, [])
        for node, found in nodes.items():
            if any(bar["kind"] != Kind.TRANSIT for bar in found):  # the way through the log is in the order
                shown = [bar for bar in found if node or bar["kind"] != Kind.TRANSIT]
                yield _lane(f"rank {rank} {node}", node or "walks", "node", shown, [])


def _order_bar(facts: RequestFacts, step: Step, order: Order, total_ns: int) -> dict[str, Any]:
    begin_ns, end_ns = _extent(facts, order, total_ns)
    report = order.report
    if report is None:
        how = "no report: the step was taken over by a later attempt" if facts.end else "no report yet"
    elif isinstance(report, WalkFailed):
        how = f"failed: {report.failure.code}"
    else:
        how = "completed" if isinstance(report, WalkCompleted) else "stopped"
    return {
        "from": begin_ns / NS,
        "to": end_ns / NS,
        "kind": "order" if report is not None else "unreported",
        "text": f"step {step.index}: {step.walks}, attempt {step.attempt}; {how}. {order.ready.reason}",
        "name": step.walks,
        "step": step.index,
        "attempt": step.attempt,
        "seq": order.seq,
        "to_seq": order.report_seq or None,
        "requests": [],
    }


def _extent(facts: RequestFacts, order: Order, total_ns: int) -> tuple[int, int]:
    """The time from an order to its report; without one to the loss of its rank, or to the end."""
    begin_ns = order.ordered_ns - facts.submitted_ns
    if order.reported_ns is not None:
        return begin_ns, order.reported_ns - facts.submitted_ns
    life = facts.incarnations.get(order.ready.incarnation or 0)
    lost = _end_of(life.lost, life.left) if life is not None else None
    end_ns = lost.time_ns - facts.submitted_ns if lost is not None else total_ns
    return begin_ns, max(begin_ns, end_ns)


def _end_of(*ends: Stored | None) -> Stored | None:
    return min((one for one in ends if one is not None), key=lambda one: one.seq, default=None)


def _parts(facts: RequestFacts, step: Step, order: Order, total_ns: int) -> Iterator[Part]:
    """The work of one rank's nodes in a step."""
    begin_ns, end_ns = _extent(facts, order, total_ns)
    alone = Step(step.attempt, step.index, {order.ready.rank: order})
    return parts_of_step(alone, begin_ns, end_ns, {})


def _absences(facts: RequestFacts, rank: int, total_ns: int) -> Iterator[dict[str, Any]]:
    """The times without a process on a rank, as far as the request was open."""
    for life in facts.incarnations.values():
        ended = _end_of(life.lost, life.left)
        if life.rank != rank or ended is None:
            continue
        after = facts.successor(life)
        begin_ns = max(0, ended.time_ns - facts.submitted_ns)
        end_ns = total_ns if after is None else after.joined_ns - facts.submitted_ns
        if end_ns <= 0 or begin_ns >= total_ns:
            continue
        process = facts.process_end(life)
        how = f"; its process {process.pid} {process.how}" if process is not None else ""
        yield {
            "from": begin_ns / NS,
            "to": min(end_ns, total_ns) / NS,
            "kind": str(Kind.AWAY),
            "text": f"rank {rank} is away: {summary_of(ended.event)}{how}",
            "name": "away",
            "step": None,
            "attempt": None,
            "seq": ended.seq,
            "to_seq": after.seq if after is not None else None,
            "requests": [],
        }


# ---- streams ---------------------------------------------------------------------------------------------


def _streams(facts: RequestFacts, history: History) -> Iterator[dict[str, Any]]:
    streams: dict[str, list[dict[str, Any]]] = {}
    for record in history.records:
        address = history.subjects.parse(record.subject)
        if address is None or address.kind != "edge" or address.request_id != facts.request_id:
            continue
        event = event_of(record, history.subjects)
        if isinstance(event, StreamSent | StreamTaken):
            at_ns = record.time_ns - facts.submitted_ns
            tick = _tick(record.seq, at_ns, type_of(event), summary_of(event))
            streams.setdefault(event.stream, []).append(tick)
    for name, ticks in streams.items():
        yield _lane(f"stream {name}", f"stream {name}", "stream", [], ticks)
