"""Load replay: submits recorded requests again, at the same times, and compares latencies.

Each recorded submission is repeated on a running deployment under a new id, at its old distance from the
first one, with its old seed.
The old requests are not touched, and only times and counts are compared: equal answers are checked by the
other levels.

Of a redacted bundle only sizes are known: the repeated prompt and answer have as many tokens.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dalsegno.bundle import manifest
from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.history.reply import Reply
from dalsegno.replay import resubmission
from dalsegno.replay.fork import signed
from dalsegno.replay.resubmission import Submission
from dalsegno.terminal import tables
from dalsegno.terminal.tables import Column
from shared.epoch_fence import EpochFence
from shared.errors import ClientError
from shared.events import ForkedFrom, Inputs, Params, RequestAdmitted, RequestSubmitted
from shared.log.nats.permissions import CLIENT
from shared.log.port import StoredRecord
from shared.quantile import quantile
from shared.subjects import Subjects

_QUANTILES: Final = (0.5, 0.9, 0.99)
_COLUMNS: Final = (Column("", 26), Column("recorded", 12, is_right=True), Column("now", 10, is_right=True))


@dataclass(slots=True)
class Arrival:
    """A recorded submission, and the answer to it."""

    request_id: str
    submission: RequestSubmitted
    seq: int
    is_redacted: bool
    admitted: RequestAdmitted | None = None
    reply: Reply = field(default_factory=Reply)


class Arrivals:
    """A fold over the records of a log, or of bundles: its requests in order of arrival."""

    def __init__(self) -> None:
        self.found: dict[str, Arrival] = {}
        self._fence = EpochFence()

    def take(self, record: StoredRecord, subjects: Subjects, *, is_redacted: bool = False) -> None:
        """Fold one record."""
        address, event = subjects.parse(record.subject), manifest.event_of(record, subjects)
        if address is None or event is None or not self._fence.admits(event) or address.request_id is None:
            return
        request_id = str(address.request_id)
        if isinstance(event, RequestSubmitted) and request_id not in self.found:
            self.found[request_id] = Arrival(request_id, event, record.seq, is_redacted)
        if (arrival := self.found.get(request_id)) is None:
            return
        if isinstance(event, RequestAdmitted) and arrival.admitted is None:
            arrival.admitted = event
        arrival.reply.take(address, event, record.seq, record.time_ns)

    def in_order(self, last: int | None = None) -> list[Arrival]:
        """The admitted requests in order of arrival; only the `last` ones if given."""
        found = [one for one in self.found.values() if one.admitted is not None]
        found.sort(key=lambda one: (one.reply.submitted_ns, one.seq))
        return found[-last:] if last else found


def submissions(arrivals: Sequence[Arrival], model: str, speed: float) -> list[Submission]:
    """The requests to submit, and when; `speed` 2 is twice as fast as recorded."""
    run = f"load-{secrets.token_hex(3)}"
    began_ns = arrivals[0].reply.submitted_ns
    return [
        Submission(
            event=_again(one, f"{run}-{number}", model),
            after_s=(one.reply.submitted_ns - began_ns) / 1e9 / speed,
        )
        for number, one in enumerate(arrivals)
    ]


def _again(one: Arrival, request_id: str, model: str) -> RequestSubmitted:
    inputs, params = one.submission.inputs, one.submission.params
    generated = len(one.reply.token_ids)
    if one.is_redacted:
        inputs, params = _of_the_same_size(one, generated)
    elif params.seed is None and one.admitted is not None:
        params = msgspec.structs.replace(params, seed=signed(one.admitted.seed))
    if one.reply.outcome == "cancelled" and generated:  # generate as many tokens as then
        params = msgspec.structs.replace(params, max_tokens=generated, min_tokens=None)
    return msgspec.structs.replace(
        one.submission,
        id="",
        writer="",
        number=0,
        request_id=request_id,
        model=model,
        inputs=inputs,
        params=params,
        parent=None,
        parts=1,
        part=0,
        correlation=None,
        trace=None,
        forked_from=ForkedFrom(request_id=one.request_id, seq=one.seq),
    )


def _of_the_same_size(one: Arrival, generated: int) -> tuple[Inputs, Params]:
    usage = one.reply.usage
    prompt = usage.prompt_tokens if usage is not None else 0
    if not prompt:
        raise ClientError(
            f"{one.request_id} is redacted and did not finish: the size of its prompt is unknown"
        )
    inputs, params = one.submission.inputs, one.submission.params
    if inputs.texts is not None:
        return _texts_of_the_same_size(inputs, prompt), params
    return (
        Inputs(token_ids=[0] * prompt, output_modalities=inputs.output_modalities),
        Params(max_tokens=max(generated, 1), temperature=params.temperature, ignore_eos=True),
    )


def _texts_of_the_same_size(inputs: Inputs, tokens: int) -> Inputs:
    """Several texts with about as many tokens together: in most tokenizers each word below is one token."""
    texts = inputs.texts or []
    text = " ".join(["a"] * max(tokens // max(len(texts), 1) - len(inputs.queries[:1]), 1))
    return msgspec.structs.replace(inputs, texts=[text for _ in texts], queries=["a" for _ in inputs.queries])


async def submit_again(arrivals: Sequence[Arrival], target: LogSource, speed: float) -> dict[str, Reply]:
    """Submit all requests and wait for the answers; return them by the old ids.

    Raises:
        DalSegnoError: no deployment runs there, or it refuses a request.
    """
    async with log_source.open_log(target, alive=True, role=CLIENT) as (log, subjects):
        model = await resubmission.model_served(log, subjects)
        asked = submissions(arrivals, model, speed)
        replies = await resubmission.answers(log, subjects, asked)
    return {one.request_id: reply for one, reply in zip(arrivals, replies.values(), strict=True)}


# ---- output ----------------------------------------------------------------------------------------------


def report(
    arrivals: Sequence[Arrival], now: dict[str, Reply], speed: float
) -> tuple[list[str], dict[str, Any]]:
    """Both runs side by side, as text lines and as JSON values."""
    sides = {"recorded": [one.reply for one in arrivals], "now": [now[one.request_id] for one in arrivals]}
    summaries = {name: summary(replies) for name, replies in sides.items()}
    requests = "request" if len(arrivals) == 1 else "requests"
    lines = [
        f"load replay of {len(arrivals)} {requests} at {speed:g} times the speed they came with",
        *tables.plain_lines(
            _COLUMNS,
            [
                [name, *(cell(values[name]) for values in summaries.values())]
                for name in summaries["recorded"]
            ],
        ),
    ]
    each = [
        {"request_id": one.request_id}
        | {side: {"outcome": r.outcome, "first_s": r.first_s, "whole_s": r.whole_s, "tokens": _tokens(r)}
           for side, r in (("recorded", one.reply), ("now", now[one.request_id]))}
        for one in arrivals
    ]  # fmt: skip
    return lines, {"level": "load", "speed": speed, **summaries, "requests": each}


def summary(replies: Iterable[Reply]) -> dict[str, float | int | None]:
    """Counts and times of answers, by their names in the report."""
    whole = [reply for reply in replies if reply.outcome != "open"]
    begins = min((reply.submitted_ns for reply in whole), default=0)
    ends = max((reply.end_ns or 0 for reply in whole), default=0)
    tokens, seconds = sum(map(_tokens, whole)), (ends - begins) / 1e9
    found: dict[str, float | int | None] = {
        "finished": sum(reply.outcome == "finished" for reply in whole),
        "otherwise": sum(reply.outcome != "finished" for reply in whole),
        "tokens": tokens,
        "seconds": seconds,
        "tokens per second": tokens / seconds if seconds else None,
    }
    for name, of in (("first chunk", "first_s"), ("whole answer", "whole_s")):
        times_ms = [1e3 * taken for reply in whole if (taken := getattr(reply, of)) is not None]
        for share in _QUANTILES:
            found[f"{name}, p{share * 100:g}, ms"] = quantile(times_ms, share)
    return found


def _tokens(reply: Reply) -> int:
    return reply.usage.completion_tokens if reply.usage is not None else len(reply.token_ids)


def cell(value: float | None) -> str:
    """A value of the report as text."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
