"""Recorded requests as a trace, and a trace's requests with the steps of recorded ones. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from dalsegno.history.prompts import prompt_of
from dalsegno.traces.calls import MAX_LENGTH, Call, TextCall, TraceError, hash_ids
from dalsegno.what_if.recorded_load import Asked, Part, Tokens
from shared.events import Inputs, Params, RequestSubmitted, encode
from shared.ids import RequestId
from shared.log.port import StoredRecord
from shared.subjects import Subjects

_MS: Final = 1_000_000


def calls_of(asked: Iterable[Asked]) -> Iterator[Call]:
    """The trace of recorded requests: of those in whose steps a language model had one sequence."""
    begin_ns: int | None = None
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for one in asked:
        tokens = _tokens_of(one)
        if tokens is None:
            continue
        begin_ns = one.at_ns if begin_ns is None else begin_ns
        yield Call(
            timestamp=(one.at_ns - begin_ns) // _MS,
            input_length=len(tokens.prompt),
            output_length=tokens.generated,
            hash_ids=hash_ids(tokens.prompt, known),
        )


def texts_of(asked: Iterable[Asked]) -> Iterator[TextCall]:
    """The trace of recorded requests with text alone; the texts of a chat's messages are joined by lines."""
    begin_ns: int | None = None
    for one in asked:
        inputs = one.event.inputs
        text = prompt_of(inputs)
        if not text.strip() or inputs.files or inputs.token_ids or inputs.texts or inputs.queries:
            continue
        begin_ns = one.at_ns if begin_ns is None else begin_ns
        yield TextCall(text=text, timestamp=(one.at_ns - begin_ns) // _MS, output_length=one.tokens)


def _tokens_of(one: Asked) -> Tokens | None:
    found = [part for parts in one.parts.values() for part in parts.values() if len(part.sequences) == 1]
    return next(iter(found[0].sequences.values())) if len(found) == 1 else None


def asked_of(calls: Sequence[Call], like: Sequence[Asked], model: str, subjects: Subjects) -> list[Asked]:
    """The requests of a trace, each with the steps of a recorded one, and its own tokens.

    Args:
        calls: the trace.
        like: recorded requests; those that finished with one sequence are taken in turn.
        model: the model's name.
        subjects: those of the log.

    Raises:
        TraceError: no recorded request is one of a language model.
    """
    donors = [one for one in like if one.outcome == "finished" and _tokens_of(one) is not None]
    if not donors:
        raise TraceError("expected recorded requests with one sequence of a language model each; found none")
    return [
        _asked(number, call, donors[number % len(donors)], model, subjects)
        for number, call in enumerate(calls)
    ]


def _asked(number: int, call: Call, donor: Asked, model: str, subjects: Subjects) -> Asked:
    request_id = RequestId(f"trace-{number}")
    event = RequestSubmitted(
        id=f"{request_id}.submitted",
        request_id=request_id,
        model=model,
        inputs=Inputs(text=""),
        params=Params(max_tokens=max(call.output_length, 1), ignore_eos=True),
    )
    at_ns = round(call.timestamp * _MS)
    return Asked(
        record=StoredRecord(number + 1, subjects.request(request_id), encode(event), at_ns),
        event=event,
        at_ns=at_ns,
        parts={
            index: {r: _part(p, call, number) for r, p in parts.items()}
            for index, parts in donor.parts.items()
        },
    )


def _part(part: Part, call: Call, number: int) -> Part:
    """A recorded part with the tokens of a request of the trace."""
    sequences = {
        node: Tokens(
            prompt=_prompt(call, number),
            generated=call.output_length,
            drafted=call.output_length * was.drafted // max(was.generated, 1),
        )
        for node, was in part.sequences.items()
    }
    lengths: dict[str, Any] = {"prompt_tokens": call.input_length, "completion_tokens": call.output_length}
    results = [
        msgspec.structs.replace(
            one, facts=one.facts | {name: lengths[name] for name in lengths if name in one.facts}
        )
        for one in part.done.results
    ]
    done = msgspec.structs.replace(part.done, results=results)
    return Part(
        order=part.order,
        done=done,
        after_s=part.after_s,
        took_s=part.took_s,
        sequences=sequences,
        others=part.others,
    )


def _prompt(call: Call, number: int) -> list[int]:
    """Token ids that are equal where the blocks are: of a request without `hash_ids`, nowhere."""
    if not call.hash_ids:
        first = -(1 + number) * MAX_LENGTH
        return list(range(first, first + call.input_length))
    tokens = [name * call.block + place for name in call.hash_ids for place in range(call.block)]
    return tokens[: call.input_length]
