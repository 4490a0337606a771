"""Forks of recorded requests, asked of a running deployment: the only thing that the studio can write.

It is off without `--allow-ask`. A fork is published with a client's credentials, as any service publishes a
request; the log itself stays opened for reading.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from conductor.core.replay import plain
from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.replay import fork, resubmission
from dalsegno.replay.recorded_request import History
from shared.errors import ClientError
from shared.events import RequestSubmitted
from shared.log.nats.permissions import CLIENT

_OF_THE_EVENT: Final = frozenset(
    {"type", "id", "writer", "number", "request_id", "forked_from", "correlation", "trace", "origin"}
)
"""Fields that say nothing about what is asked."""
_NESTED: Final = frozenset({"inputs", "params"})


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """A new version of a recorded request.

    Attributes:
        seq: the position up to which both are the same.
        differences: its fields that differ, each as its name, recorded value and new value.
        kept_tokens: of the recorded answer, those that become part of its prompt.
    """

    event: RequestSubmitted
    seq: int
    differences: list[tuple[str, Any, Any]]
    kept_tokens: int

    @property
    def plain(self) -> dict[str, Any]:
        """What will be asked, as JSON values."""
        return {
            "seq": self.seq,
            "kept_tokens": self.kept_tokens,
            "differences": [
                {"field": field, "recorded": was, "asked": becomes}
                for field, was, becomes in self.differences
            ],
        }


def fork_of(history: History, request_id: str, seq: int | None, changes: Sequence[str]) -> Fork:
    """Return a fork of a request.

    Args:
        history: its records.
        request_id: one of the history's requests.
        seq: a position of the history; the submission's if None.
        changes: each `KEY=VALUE`, as for `dalsegno replay --set`.

    Raises:
        ClientError: there is no such position or key, the new request is invalid, or the history is redacted.
    """
    subject = history.subjects.request(request_id)
    first = next((record.seq for record in history.records if record.subject == subject), None)
    if first is None:
        raise ClientError(f"request {request_id!r}: its submission is missing from these records")
    original, at = fork.located(history, str(first if seq is None else seq))
    if original.request_id != request_id:
        raise ClientError(f"record {at} is of request {original.request_id}: open that one to fork it there")
    event = fork.forked(original, at, changes)
    was, becomes = _fields(fork.seeded(original)), _fields(event)
    return Fork(
        event=event,
        seq=at,
        differences=[
            (name, was.get(name), becomes.get(name))
            for name in sorted({*was, *becomes})
            if was.get(name) != becomes.get(name)
        ],
        kept_tokens=fork.kept_tokens(original, at),
    )


def _fields(event: RequestSubmitted) -> dict[str, Any]:
    """What is asked, by name: `model`, `params.temperature`, `inputs.text`."""
    found: dict[str, Any] = {}
    for name, value in plain(event).items():
        if name in _OF_THE_EVENT:
            continue
        inner = value if name in _NESTED and isinstance(value, dict) else None
        found |= {name: value} if inner is None else {f"{name}.{key}": one for key, one in inner.items()}
    return found


@dataclass(frozen=True, slots=True)
class Asker:
    """Submits forks to the deployment that writes a log."""

    where: LogSource

    async def ask(self, wanted: Fork) -> str:
        """Submit a fork; return its request id.

        Raises:
            DalSegnoError: no deployment runs there, or it refuses the request.
        """
        async with log_source.open_log(self.where, alive=True, role=CLIENT) as (log, subjects):
            await resubmission.submit(log, subjects, wanted.event)
        return str(wanted.event.request_id)
