"""Load replay of a trace: submits requests of its lengths, at its times, and measures latencies.

A trace has no tokens. Blocks of equal names become equal tokens, so that prompts share what they shared, and
answers have the lengths of the trace, whatever the model would say: they do not end at its end token. A trace
with texts is asked with these texts, and where it does not tell how long an answer is, the model ends it.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Final

from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.history.reply import Reply
from dalsegno.replay import load_replay, resubmission
from dalsegno.replay.resubmission import Submission
from dalsegno.terminal import tables
from dalsegno.terminal.tables import Column
from dalsegno.traces.calls import AnyCall, Call, TextCall, Trace
from shared.events import Inputs, Params, RequestSubmitted
from shared.ids import RequestId
from shared.log.nats.permissions import CLIENT

_DIGIT_BITS: Final = 3
"""Bits of a number in one token: ids below 8 are in every vocabulary."""
_NAME_DIGITS: Final = 12
_SALT_DIGITS: Final = 4
_COLUMNS: Final = (Column("", 26), Column("trace", 12, is_right=True), Column("now", 10, is_right=True))


def submissions(trace: Trace, model: str, speed: float) -> list[Submission]:
    """The requests to submit, and when; `speed` 2 is twice as fast as the trace."""
    run, salt = f"load-{secrets.token_hex(3)}", secrets.randbits(_DIGIT_BITS * _SALT_DIGITS)
    return [
        Submission(event=_event(one, number, run, model, salt), after_s=(one.timestamp or 0.0) / 1e3 / speed)
        for number, one in enumerate(trace.calls)
    ]


def _event(one: AnyCall, number: int, run: str, model: str, salt: int) -> RequestSubmitted:
    length = one.output_length
    request_id = f"{run}-{number}"
    return RequestSubmitted(
        id=f"{request_id}.submitted",
        request_id=RequestId(request_id),
        model=model,
        inputs=Inputs(text=one.text)
        if isinstance(one, TextCall)
        else Inputs(token_ids=tokens_of(one, number, salt)),
        params=Params(temperature=0.0)
        if length is None
        else Params(max_tokens=max(length, 1), temperature=0.0, ignore_eos=True),
    )


def tokens_of(call: Call, number: int, salt: int = 0) -> list[int]:
    """Return a prompt of a call's length: equal where the names of its blocks are, else different.

    Args:
        call: gives the length, and the names of blocks.
        number: of the request in its trace; names the blocks of a call that names none.
        salt: a number of this run: a prefix that an earlier run left in the cache is not found again.
    """
    tokens: list[int] = []
    for block in range(-(-call.input_length // call.block)):
        # Odd names are those of requests, even ones those of the trace.
        name = 2 * call.hash_ids[block] if call.hash_ids else 2 * number + 1
        head = [*_digits(name, _NAME_DIGITS), *(_digits(salt, _SALT_DIGITS) if not block else ())]
        tokens += [*head, *[0] * call.block][: call.block]
    return tokens[: call.input_length]


def _digits(value: int, count: int) -> list[int]:
    return [value >> shift & (1 << _DIGIT_BITS) - 1 for shift in range(0, _DIGIT_BITS * count, _DIGIT_BITS)]


async def submit(trace: Trace, target: LogSource, speed: float) -> list[Reply]:
    """Submit all requests and wait for the answers; return them in the order of the trace.

    Raises:
        DalSegnoError: no deployment runs there, or it refuses a request.
    """
    async with log_source.open_log(target, alive=True, role=CLIENT) as (log, subjects):
        model = await resubmission.model_served(log, subjects)
        replies = await resubmission.answers(log, subjects, submissions(trace, model, speed))
    return list(replies.values())


def report(trace: Trace, now: Sequence[Reply], speed: float) -> tuple[list[str], dict[str, Any]]:
    """What the trace asks for, and what came, as text lines and as JSON values."""
    summary = load_replay.summary(now)
    known = [one.output_length for one in trace.calls]
    asked: dict[str, float | int | None] = {
        "finished": len(trace.calls),
        "tokens": None if None in known else sum(one or 0 for one in known),
        "seconds": max(one.timestamp or 0.0 for one in trace.calls) / 1e3 / speed,
    }
    requests = "request" if len(now) == 1 else "requests"
    lines = [
        f"load replay of {len(now)} {requests} of a trace ({trace.form}) at {speed:g} times its speed",
        *tables.plain_lines(
            _COLUMNS,
            [
                [name, load_replay.cell(asked.get(name)), load_replay.cell(value)]
                for name, value in summary.items()
            ],
        ),
    ]
    each = [
        {
            "timestamp": one.timestamp,
            "input_length": one.input_length if isinstance(one, Call) else None,
            "output_length": one.output_length,
            "outcome": reply.outcome,
            "first_s": reply.first_s,
            "whole_s": reply.whole_s,
        }
        for one, reply in zip(trace.calls, now, strict=True)
    ]
    return lines, {"level": "load", "speed": speed, "trace": asked, "now": summary, "requests": each}
