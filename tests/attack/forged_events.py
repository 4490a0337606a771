"""Forged events: one of every type, about a request of the attacker's choice, as plain MessagePack.

The fields are those of docs/asyncapi.yaml. An event that a request is waiting for is the most dangerous one.
So each type comes in several variants: with the id that the genuine event will have, with the incarnation of
the rank that executes the request, and with an attempt and an epoch above all others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

PREFIX: Final = "ds"
NO_HISTORY: Final = b"\0" * 16
_LIMITS: Final = {"max_seq_len": 512, "kv_tokens": 512, "default_max_tokens": 64, "max_attempts": 2}
_PINS: Final = dict.fromkeys(("graph", "plan", "config", "core", "submission"), "0" * 32)
_FAILURE: Final = {"code": "forged", "message": "forged", "status": 500}
_TOTALS: Final = {"chunks": 1, "digest": "0" * 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The request to forge events about, and what the forger knows of it.

    Attributes:
        rank: the rank that executes the request; `incarnation` is its incarnation.
        by: the rank whose subjects the forger uses.
        epoch: the epoch that the forger claims.
        ids: by event type, the ids that genuine events of the request will have.
    """

    request_id: str
    origin: str
    rank: int
    incarnation: int
    by: int
    epoch: int
    next_index: int = 0
    ids: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forgery:
    """One event on one subject."""

    kind: str
    subject: str
    event: dict[str, Any]

    @property
    def data(self) -> bytes:
        return bytes(msgpack.packb(self.event))

    def __str__(self) -> str:
        return f"{self.kind} on {self.subject}: {self.event!r:.400}"


def contents(aim: Aim) -> dict[str, dict[str, Any]]:
    """By event type, the fields of a forged event besides those of every event."""
    placement = {"prepare": aim.by, "llm": aim.by}
    lives = {f"w{aim.by}": aim.incarnation}
    order = {
        "rank": aim.rank,
        "model": "attacked",
        "walks": [{"name": "main"}],
        "placement": placement,
        "origin": aim.origin,
        "seed": 1,
        "reason": "forged",
        "history": NO_HISTORY,
    }
    chunk = {"text": "FORGED", "token_ids": [1, 2, 3]}
    return {
        "output.chunk.v1": chunk,
        "output.fence.v1": {"reason": "forged", "history": NO_HISTORY},
        "request.admitted.v1": {
            "family": "decoder_lm", "seed": 1, "placement": placement, "limits": _LIMITS,
            "pins": _PINS, "reason": "forged", "lives": lives,
        },
        "request.resumed.v1": {"placement": placement, "reason": "forged", "lives": lives},
        "deadline.passed.v1": {"deadline_ns": 1},
        "request.rejected.v1": {"failure": _FAILURE, "submission_seq": 1, "history": NO_HISTORY},
        "request.finished.v1": {
            "usage": {"prompt_tokens": 1, "completion_tokens": 1}, "finish_reasons": ["stop"],
            "output": _TOTALS, "history": NO_HISTORY,
        },
        "request.failed.v1": {"failure": _FAILURE, "history": NO_HISTORY},
        "request.cancelled.v1": {"reason": "forged", "history": NO_HISTORY},
        "node.ready.v1": order,
        "walk.stop.v1": {"rank": aim.rank, "reason": "forged", "history": NO_HISTORY},
        "walk.begun.v1": {"rank": aim.by},
        "walk.progressed.v1": {"rank": aim.by, "tokens": 3},
        "walk.completed.v1": {
            "rank": aim.by, "results": [{"name": "main", "facts": {"finish_reason": "stop"}}],
            "output": _TOTALS,
        },
        "walk.failed.v1": {"rank": aim.by, "failure": _FAILURE},
        "walk.stopped.v1": {"rank": aim.by, "steps_after": 0, "tokens": 1},
        "node.fired.v1": {"walk": 0, "node": "prepare", "path": [0], "to_life": aim.incarnation},
        "stream.sent.v1": {"stream": "text", "to": "llm", "end": True, "to_life": aim.incarnation},
        "stream.taken.v1": {"stream": "text", "taken": 1, "to_life": aim.incarnation},
        "tensors.released.v1": {"keys": ["x"], "to_life": aim.incarnation},
        "worker.joined.v1": {
            "rank": aim.by, "model": "attacked", "nodes": ["prepare", "llm"], "device": "cpu",
        },
        "worker.leaving.v1": {"rank": aim.by},
        "worker.lost.v1": {"rank": aim.rank, "reason": "forged"},
        "epoch.opened.v1": {"conductor": "forged", "core": "0" * 32},
        "request.submitted.v1": {"model": "attacked", "inputs": {"text": "FORGED"}, "origin": aim.origin},
        "request.cancel.v1": {"reason": "forged"},
        "request.watched.v1": {"is_over": True},
        "adapter.loaded.v1": {"adapter": {"name": "forged", "digest": "00", "folder": "/forged"}},
        "adapter.unloaded.v1": {"name": "forged"},
        "requests.refused.v1": {
            "since_ns": 1, "counts": [{"code": "forged", "status": 400, "count": 99}],
        },
        "batch.created.v1": {
            "endpoint": "/v1/chat/completions", "input": "0" * 64, "window": "24h", "created_s": 1,
            "expires_s": 2,
        },
        "batch.claimed.v1": {},
        "batch.checked.v1": {"lines": 1},
        "batch.segment.stored.v1": {"segment": 0, "completed": 1, "failed": 0},
        "batch.cancelled.v1": {},
        "batch.ended.v1": {"status": "completed"},
        "conversation.created.v1": {"created_s": 1},
        "conversation.changed.v1": {"added": [{"type": "message"}]},
        "conversation.deleted.v1": {},
        "log.sealed.v1": {"first_seq": 1, "last_seq": 2, "previous": NO_HISTORY, "chain": NO_HISTORY},
    }  # fmt: skip


def subjects(aim: Aim) -> dict[str, str]:
    """By kind of subject, the subject that concerns the request; a worker's are the forger's own."""
    about = aim.request_id
    return {
        "request": f"{PREFIX}.request.{about}",
        "control": f"{PREFIX}.control.{about}",
        "walk": f"{PREFIX}.walk.{about}",
        "ready": f"{PREFIX}.ready.{aim.rank}.{about}",
        "done": f"{PREFIX}.done.{aim.by}.{about}",
        "edge": f"{PREFIX}.edge.{aim.rank}.{aim.by}.{about}",
        "output": f"{PREFIX}.output.{aim.origin}.{about}.w{aim.by}",
        "fence": f"{PREFIX}.output.{aim.origin}.{about}.conductor",
        "worker": f"{PREFIX}.worker.{aim.by}",
        "epoch": f"{PREFIX}.conductor.epoch",
        "lost": f"{PREFIX}.conductor.lost",
        "sealed": f"{PREFIX}.conductor.sealed",
        "adapter": f"{PREFIX}.adapter.forged",
        "refused": f"{PREFIX}.refused.g-1",
        "batch": f"{PREFIX}.batch.forged",
        "conversation": f"{PREFIX}.conversation.forged",
    }


HOMES: Final[dict[str, str]] = {
    "output.chunk.v1": "output",
    "output.fence.v1": "fence",
    **dict.fromkeys(
        (
            "request.admitted.v1", "request.resumed.v1", "deadline.passed.v1", "request.rejected.v1",
            "request.finished.v1", "request.failed.v1", "request.cancelled.v1",
        ),
        "walk",
    ),
    **dict.fromkeys(("node.ready.v1", "walk.stop.v1"), "ready"),
    **dict.fromkeys(
        ("walk.begun.v1", "walk.progressed.v1", "walk.completed.v1", "walk.failed.v1", "walk.stopped.v1"),
        "done",
    ),
    **dict.fromkeys(("node.fired.v1", "stream.sent.v1", "stream.taken.v1", "tensors.released.v1"), "edge"),
    **dict.fromkeys(("worker.joined.v1", "worker.leaving.v1"), "worker"),
    "worker.lost.v1": "lost",
    "epoch.opened.v1": "epoch",
    "log.sealed.v1": "sealed",
    **dict.fromkeys(("adapter.loaded.v1", "adapter.unloaded.v1"), "adapter"),
    "requests.refused.v1": "refused",
    **dict.fromkeys(
        (
            "batch.created.v1", "batch.claimed.v1", "batch.checked.v1", "batch.segment.stored.v1",
            "batch.cancelled.v1", "batch.ended.v1",
        ),
        "batch",
    ),
    **dict.fromkeys(
        ("conversation.created.v1", "conversation.changed.v1", "conversation.deleted.v1"), "conversation"
    ),
    "request.submitted.v1": "request",
    **dict.fromkeys(("request.cancel.v1", "request.watched.v1"), "control"),
}  # fmt: skip
"""By event type, the kind of the subject where it belongs."""


def forgeries(aim: Aim, home: str, *, types: tuple[str, ...] = ()) -> Iterator[Forgery]:
    """Every type of event (or those of `types`) on the subject `home`, in all its variants."""
    subject = subjects(aim)[home]
    for kind, own in contents(aim).items():
        if types and kind not in types:
            continue
        for number, common in enumerate(_variants(aim, kind)):
            event = {"type": kind, "id": f"forged.{kind}.{number}", **own, **common}
            if kind == "output.chunk.v1":  # one of them comes before the genuine chunk of its index
                event["index"] = aim.next_index + number
            yield Forgery(kind, subject, event)


def _variants(aim: Aim, kind: str) -> Iterator[dict[str, Any]]:
    about = {"request_id": aim.request_id, "index": aim.next_index}
    writers = ("conductor", f"w{aim.rank}", f"w{aim.by}", "g-1")
    for incarnation in (aim.incarnation, None, 1):
        for attempt in (1, 99):
            common = {**about, "attempt": attempt, "epoch": aim.epoch, "incarnation": incarnation}
            for writer in writers[: 4 if incarnation == aim.incarnation else 1]:
                yield {**common, "writer": writer}
    genuine = {"writer": f"w{aim.rank}", "attempt": 1, "epoch": aim.epoch, "incarnation": aim.incarnation}
    for identity in aim.ids.get(kind, ()):
        yield {**about, **genuine, "id": identity}
