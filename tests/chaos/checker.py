"""The checker: compares what clients received with the raw stream, and with an undisturbed run.

It is written from the rules of the log (docs/nats.md, ARCHITECTURE.md), and not from the code that implements
them: it decodes MessagePack into plain dictionaries and folds those itself.

    Each accepted request ends exactly once.
    A chunk is valid unless a higher attempt was fenced before it, its index was taken, or the request ended.
    A chunk is valid only on the subject of a rank that the latest admission or resumption placed the request
    on, and only from the incarnation that this record names for the rank.
    A valid chunk's incarnation was ordered to execute the request.
    Each type of event counts only on its own subject.
    A conductor's event of a deposed epoch is void.
    Copies of an event with the same id are equal.
    No valid chunk follows the end of a complete answer.
    Offsets are consecutive; the usage is what was counted; the end states the number of chunks.
    A client received exactly the valid chunks, unchanged, in order, each once; then the end, once.
    All of it equals an undisturbed run of the same request.
"""

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tests.chaos.rawlog import Record
from tests.chaos.seen import Piece, Seen

Event = dict[str, Any]
_ENDS: Final = {
    "request.finished.v1": "finished",
    "request.failed.v1": "failed",
    "request.cancelled.v1": "cancelled",
}
_OF_A_COPY: Final = frozenset({"number", "epoch", "writer", "trace"})
"""What copies of one event may differ in: a successor publishes what its predecessor had decided."""
_CLOSE: Final = 1e-3
"""Log probabilities that were computed in another batch differ by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A violation of a rule.

    Attributes:
        kind: a short name.
        tokens: the number of tokens that came twice or not at all, if it is about tokens.
    """

    kind: str
    request_id: str
    message: str
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.request_id}: {self.message}"


@dataclass(slots=True)
class Logged:
    """One request, as the stream has it.

    Attributes:
        chunks: the valid chunks, in the order in which they became valid; clients count them.
        held: out-of-order chunks, by track and index; each track has its own indices.
        ends: kind and event of each valid end; more than one only if ids differ.
        behind: indices of chunks after the end that would otherwise be valid.
        placed: the ranks that the request is placed on; `lives`, the incarnation of each writer, if recorded.
        ordered: by rank, the incarnations that were ordered to execute the request.
        unordered: indices of valid chunks from an incarnation that was not.
    """

    request_id: str
    submitted: list[int] = field(default_factory=list)
    attempt: int = 0
    attempts: int = 0
    chunks: list[Event] = field(default_factory=list)
    held: dict[tuple[str, int], Event] = field(default_factory=dict)
    following: Counter[str] = field(default_factory=Counter)
    ends: dict[str, tuple[str, Event]] = field(default_factory=dict)
    behind: list[int] = field(default_factory=list)
    placed: frozenset[int] = frozenset()
    lives: Mapping[str, int] = field(default_factory=dict)
    ordered: dict[int, set[int]] = field(default_factory=dict)
    unordered: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.get("token_ids", [])]

    @property
    def text(self) -> str:
        return "".join(chunk.get("text", "") for chunk in self.chunks)

    @property
    def end(self) -> tuple[str, Event] | None:
        return next(iter(self.ends.values()), None)

    def place(self, event: Event) -> None:
        """Fold an admission or a resumption: from here on, other ranks and incarnations are strangers."""
        by_walk = event.get("walk_placement", {}).values()
        self.placed = frozenset(
            rank for nodes in (event.get("placement", {}), *by_walk) for rank in nodes.values()
        )
        self.lives = event.get("lives", {})

    def order(self, rank: int, incarnation: int) -> None:
        self.ordered.setdefault(rank, set()).add(incarnation)

    def chunk(self, chunk: Event, writer: str) -> None:
        """Fold a chunk on the subject of `writer`, valid or void."""
        track, index = chunk.get("track", ""), chunk.get("index", 0)
        rank = int(writer[1:]) if writer[:1] == "w" and writer[1:].isdecimal() else None
        if rank not in self.placed or self.lives.get(writer, chunk.get("incarnation")) != chunk.get(
            "incarnation"
        ):
            return
        if chunk.get("attempt", 0) < self.attempt or index < self.following[track]:
            return
        if self.end is not None:
            self.behind.append(index)
            return
        if chunk.get("incarnation") not in self.ordered.get(rank, {chunk.get("incarnation")}):
            self.unordered.append(index)
        self.held.setdefault((track, index), chunk)
        while (found := self.held.pop((track, self.following[track]), None)) is not None:
            self.following[track] += 1
            self.chunks.append(found)

    def fence(self, attempt: int) -> None:
        if attempt > self.attempt:
            self.attempt = attempt
            self.held.clear()


class Stream:
    """The folded stream: every request by its id, and contradictions found on the way."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.requests: dict[str, Logged] = {}
        self.findings: list[Finding] = []
        self.types: Counter[str] = Counter()
        self._epoch = 0
        self._first: dict[tuple[str, str], Event] = {}
        for record in records:
            self._fold(record)

    def _fold(self, record: Record) -> None:
        _, kind, *rest = record.subject.split(".")
        event = _decoded(record.data)
        if event is None:
            return
        name = event.get("type", "request.submitted.v1" if kind == "request" else "")
        self.types[name] += 1
        if name == "epoch.opened.v1" and kind == "conductor":
            self._epoch = max(self._epoch, event.get("epoch", 0))
            return
        if event.get("writer") == "conductor" and event.get("epoch", 0) < self._epoch:
            return
        if kind in {"conductor", "worker"}:
            return
        self._compare(record, event)
        request = self._request(rest[1] if kind in {"output", "ready", "done"} else rest[-1])
        match kind, name:
            case "request", _:
                request.submitted.append(record.seq)
            case "walk", "request.admitted.v1" | "request.resumed.v1":
                request.place(event)
            case "ready", "node.ready.v1":
                request.order(int(rest[0]), event.get("incarnation", 0))
            case "output", "output.chunk.v1":
                request.chunk(event, rest[-1])
            case "output", "output.fence.v1" if rest[-1] == "conductor":
                request.fence(event.get("attempt", 0))
                request.attempts += 1
            case "walk", _ if name in _ENDS:
                request.ends.setdefault(event["id"], (_ENDS[name], event))
            case "walk", "request.rejected.v1" if request.submitted[:1] == [event["submission_seq"]]:
                request.ends.setdefault(event["id"], ("rejected", event))  # else of another one with its id

    def _request(self, request_id: str) -> Logged:
        return self.requests.setdefault(request_id, Logged(request_id))

    def _compare(self, record: Record, event: Event) -> None:
        """Compare a copy with the first one."""
        if not event.get("id"):
            return
        said = {name: value for name, value in event.items() if name not in _OF_A_COPY}
        first = self._first.setdefault((record.subject, event["id"]), said)
        if first != said:
            differs = sorted(name for name in first | said if first.get(name) != said.get(name))
            self.findings.append(
                Finding(
                    kind="contradiction",
                    request_id=str(event.get("request_id")),
                    message=f"two events {event['id']} ({event.get('type')}, the second at {record.seq}) "
                    f"differ in {', '.join(differs)}",
                )
            )


def _decoded(data: bytes) -> Event | None:
    try:
        found = json.loads(data) if data[:1] == b"{" else msgspec.msgpack.decode(data)
    except (ValueError, msgspec.DecodeError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The result of an undisturbed run: text or sound, tokens and end of each choice; and the usage."""

    texts: tuple[str, ...]
    data: tuple[bytes, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    usage: Mapping[str, int]
    logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, seen: Seen, stream: Stream) -> "Expected":
        """The result that a client received, or that the stream has."""
        parts = [stream.requests[one] for one in parts_of(seen)]
        return cls(
            texts=tuple(_text(seen, choice, part) for choice, part in enumerate(parts)),
            data=tuple(_data(seen, choice, part) for choice, part in enumerate(parts)),
            token_ids=tuple(tuple(part.tokens) for part in parts),
            finish_reasons=tuple(_reason(part) for part in parts),
            usage=seen.usages[0],
            logprobs=tuple(_logprobs_told(seen, choice) for choice in range(seen.question.choices)),
        )


def _text(seen: Seen, choice: int, part: Logged) -> str:
    """The text of a choice: the log's, but of a document what was made of it."""
    return seen.text_of(choice) if seen.question.is_whole else part.text


def _data(seen: Seen, choice: int, part: Logged) -> bytes:
    if seen.question.is_whole:
        return seen.data_of(choice)
    return b"".join(chunk.get("data") or b"" for chunk in part.chunks)


def parts_of(seen: Seen) -> list[str]:
    """The logged requests of a question, by choice."""
    return [
        seen.request_id if choice == 0 else f"{seen.request_id}-{choice}"
        for choice in range(seen.question.choices)
    ]


def check(
    records: Iterable[Record],
    seen: Sequence[Seen],
    expected: Mapping[str, Expected] | None = None,
    *,
    earlier: Container[str] = (),
) -> list[Finding]:
    """All findings.

    `expected` is by the name of the question; `earlier` are requests that began before these records.
    """
    stream = Stream(records)
    findings = [*stream.findings]
    for request in stream.requests.values():
        if request.request_id not in earlier:
            findings += _of_request(request)
    for one in seen:
        findings += _of_client(one, stream)
        wanted = (expected or {}).get(one.question.name)
        if wanted is not None and not one.left and not one.gave_up and not one.question.fails_with:
            findings += _against(one, stream, wanted)
    return findings


def check_open(records: Iterable[Record]) -> list[str]:
    """The accepted requests that have not ended."""
    stream = Stream(records)
    return [one.request_id for one in stream.requests.values() if one.submitted and not one.ends]


# ---- one request, on the log ---------------------------------------------------------------------------


def _of_request(request: Logged) -> list[Finding]:
    def found(kind: str, message: str, tokens: int = 0) -> Finding:
        return Finding(kind=kind, request_id=request.request_id, message=message, tokens=tokens)

    findings: list[Finding] = []
    if not request.submitted:
        return [found("never-submitted", "the log has events of it and no submission")]
    if len(request.submitted) > 1:
        findings.append(found("submitted-twice", f"it was accepted at {request.submitted}"))
    if not request.ends:
        findings.append(found("no-end", f"accepted at {request.submitted[0]}, and has no end"))
    if len(request.ends) > 1:
        kinds = ", ".join(f"{name} ({kind})" for name, (kind, _) in request.ends.items())
        findings.append(found("two-ends", f"it ended as {kinds}"))
    if request.unordered:
        findings.append(
            found("unordered", f"chunks {request.unordered} are of incarnations without an order")
        )
    findings += _offsets(request, found)
    if request.end is not None and request.end[0] == "finished":
        findings += _totals(request, request.end[1], found)
    return findings


def _offsets(request: Logged, found: Any) -> list[Finding]:
    findings, tokens, chars = [], 0, 0
    for chunk in request.chunks:
        at = chunk.get("token_offset", 0), chunk.get("text_offset", 0)
        if at != (tokens, chars):
            told = f"chunk {chunk.get('index', 0)} says {at}, {(tokens, chars)} came before"
            findings.append(found("offset", f"tokens and characters do not follow on: {told}"))
            break
        tokens += len(chunk.get("token_ids", []))
        chars += len(chunk.get("text", ""))
    return findings


def _totals(request: Logged, end: Event, found: Any) -> list[Finding]:
    findings = []
    if request.behind:
        findings.append(found("behind-the-end", f"chunks {request.behind} are valid behind its end"))
    told = end.get("output", {}).get("chunks", 0)
    if told != len(request.chunks):
        findings.append(
            found("chunk-count", f"its end says {told} chunks, the log has {len(request.chunks)}")
        )
    used = end.get("usage", {}).get("completion_tokens", 0)
    speaks = any(chunk.get("data") for chunk in request.chunks)  # sound has no tokens of its own
    if used != len(request.tokens) and not speaks:
        findings.append(found("usage", f"its end says {used} tokens, its chunks have {len(request.tokens)}"))
    return findings


# ---- one client ----------------------------------------------------------------------------------------


def _of_client(seen: Seen, stream: Stream) -> list[Finding]:
    def found(kind: str, message: str, tokens: int = 0) -> Finding:
        return Finding(kind=kind, request_id=seen.request_id, message=message, tokens=tokens)

    if seen.question.fails_with and (seen.question.cancels_after is None or seen.is_cancelled):
        return _failure(seen, stream.requests.get(seen.request_id, Logged(seen.request_id)), found)
    if seen.gave_up:
        return [found("lost", f"the client has no answer: {seen.gave_up}")]
    findings: list[Finding] = []
    for choice, part in enumerate(parts_of(seen)):
        request = stream.requests.get(part)
        if request is None or not request.submitted:
            findings.append(found("not-on-the-log", f"it was answered, and the log has no request {part}"))
            continue
        mine = [piece for piece in seen.pieces if piece.choice == choice]
        findings += (
            _document(mine, request, found) if seen.question.is_whole else _pieces(mine, request, seen, found)
        )
        if not seen.left:
            findings += _ending(mine, request, found)
    if not seen.left and seen.completions != 1:
        findings.append(found("completed", f"it was said to be complete {seen.completions} times"))
    if not seen.left and len(seen.usages) != 1:
        findings.append(found("usage", f"it was told its usage {len(seen.usages)} times"))
    return findings


def _failure(seen: Seen, request: Logged, found: Any) -> list[Finding]:
    """Check that a question that must fail did, alone and with the right error."""
    wanted = seen.question.fails_with
    findings = _pieces(seen.pieces, request, seen, found)
    if f" {wanted}: " not in f" {seen.gave_up}":
        findings.append(found("told-otherwise", f"expected {wanted}, it was told {seen.gave_up!r}"))
    kind = "failed" if seen.question.cancels_after is None else "cancelled"
    if request.end is None or request.end[0] != kind:
        findings.append(found("ended-otherwise", f"expected it to be {kind}, it ended as {request.end}"))
    return findings


def _pieces(mine: Sequence[Piece], request: Logged, seen: Seen, found: Any) -> list[Finding]:
    """Check that the pieces are the valid chunks, unchanged, in order, each once."""
    findings: list[Finding] = []
    told: set[int] = set()
    following = 0
    for piece in mine:
        if piece.index is None:
            if piece.finish_reason is None and piece.text:
                findings.append(found("unnamed", f"a piece without an index says {piece.text!r}"))
            continue
        if piece.index >= len(request.chunks):
            findings.append(found("invented", f"it was told chunk {piece.index}, which the log has not"))
            continue
        chunk = request.chunks[piece.index]
        size = len(chunk.get("token_ids", []))
        if piece.index in told:
            findings.append(found("twice", f"it was told chunk {piece.index} twice", size))
        elif piece.index < following:
            findings.append(found("order", f"it was told chunk {piece.index} behind chunk {following - 1}"))
        told.add(piece.index)
        following = max(following, piece.index + 1)
        findings += _altered(piece, chunk, found)
    if seen.left:
        return findings  # of what it did not wait for nothing is missing, but a hole is one
    for index, chunk in enumerate(request.chunks):
        if index not in told and not _is_silent(chunk, seen):
            size = len(chunk.get("token_ids", []))
            findings.append(found("missing", f"it was not told chunk {index}", size))
    return findings


def _document(mine: Sequence[Piece], request: Logged, found: Any) -> list[Finding]:
    """Check that a document's text is the text of the valid chunks; calls and vectors are not text."""
    told = "".join(piece.text for piece in mine)
    if told[:1] == "[" or told == request.text:
        return []
    return [found("altered", f"the text it was told is {told!r:.80}, the log has {request.text!r:.80}")]


def _is_silent(chunk: Event, seen: Seen) -> bool:
    """True if OpenAI's stream has no event for a chunk: tokens without text yet."""
    return seen.question.way.startswith("/v1/") and not chunk.get("text")


def _altered(piece: Piece, chunk: Event, found: Any) -> list[Finding]:
    told: list[tuple[str, Any, Any]] = [
        ("sound", piece.data, chunk.get("data") or b""),
        ("text", piece.text, chunk.get("text", "")),
    ]
    if piece.token_ids is not None:
        told.append(("tokens", list(piece.token_ids), chunk.get("token_ids", [])))
        if piece.logprobs is not None:
            listed = [one["logprob"] for one in chunk.get("logprobs") or []]
            told.append(("logprobs", list(piece.logprobs), listed))
    return [
        found("altered", f"chunk {piece.index}: the {what} it was told is {mine!r:.80}, not {theirs!r:.80}")
        for what, mine, theirs in told
        if mine != theirs
    ]


def _ending(mine: Sequence[Piece], request: Logged, found: Any) -> list[Finding]:
    ends = [place for place, piece in enumerate(mine) if piece.finish_reason is not None]
    if not ends:
        return [found("end-missing", f"it was not told how {request.request_id} ended")]
    findings = []
    if len(ends) > 1:
        findings.append(found("end-twice", f"it was told {len(ends)} times how {request.request_id} ended"))
    if any(piece.index is not None for piece in mine[ends[0] :]):
        findings.append(found("behind-the-end", "it was told chunks behind the end"))
    reason = mine[ends[0]].finish_reason
    if request.end is not None and request.end[0] == "finished" and reason != _reason(request):
        findings.append(found("altered", f"it was told the end {reason!r}, the log has {_reason(request)!r}"))
    return findings


def _reason(request: Logged) -> str:
    if request.end is None or request.end[0] != "finished":
        return ""
    return str((request.end[1].get("finish_reasons") or ["stop"])[0])


# ---- an undisturbed run --------------------------------------------------------------------------------


def _against(seen: Seen, stream: Stream, wanted: Expected) -> list[Finding]:
    """Compare with the undisturbed run."""

    def found(kind: str, message: str) -> Finding:
        return Finding(kind=kind, request_id=seen.request_id, message=message)

    findings: list[Finding] = []
    for choice, part in enumerate(parts_of(seen)):
        request = stream.requests.get(part, Logged(part))
        if tuple(request.tokens) != wanted.token_ids[choice]:
            at = _first_difference(request.tokens, wanted.token_ids[choice])
            findings.append(found("differs", f"from token {at} on, {part} is not what it is undisturbed"))
        if seen.text_of(choice) != wanted.texts[choice]:
            at = _first_difference(seen.text_of(choice), wanted.texts[choice])
            findings.append(found("differs", f"its text is another from character {at} on ({part})"))
        if seen.data_of(choice) != wanted.data[choice]:
            at = _first_difference(seen.data_of(choice), wanted.data[choice])
            findings.append(found("differs", f"its sound is another from byte {at} on ({part})"))
        if _reason(request) != wanted.finish_reasons[choice]:
            findings.append(found("differs", f"{part} ended with {_reason(request)!r}"))
        findings += _against_logprobs(_logprobs_told(seen, choice), wanted.logprobs[choice], found)
    if any(usage != wanted.usage for usage in seen.usages):
        findings.append(found("usage", f"it was told {seen.usages}, undisturbed it is {dict(wanted.usage)}"))
    return findings


def _logprobs_told(seen: Seen, choice: int) -> tuple[float, ...]:
    mine = (piece for piece in seen.pieces if piece.choice == choice)
    return tuple(one for piece in mine for one in piece.logprobs or ())


def _against_logprobs(mine: Sequence[float], theirs: Sequence[float], found: Any) -> list[Finding]:
    if len(mine) != len(theirs):
        return [found("logprobs", f"it was told {len(mine)} log probabilities, undisturbed {len(theirs)}")]
    far = [
        place for place, pair in enumerate(zip(mine, theirs, strict=True)) if abs(pair[0] - pair[1]) > _CLOSE
    ]
    return [found("logprobs", f"the log probability of token {far[0]} is another")] if far else []


def _first_difference(mine: Sequence[object], theirs: Sequence[object]) -> int:
    pairs = zip(mine, theirs, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(mine), len(theirs))
    )
