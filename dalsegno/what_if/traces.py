"""Traces of traffic: when requests came, and how long their prompts and answers were. Pure.

The format is that of Mooncake's published traces, one JSON object per line:

    {"timestamp": 1500, "input_length": 1040, "output_length": 87, "hash_ids": [0, 1, 2]}

`timestamp` is milliseconds from the beginning. `hash_ids` names the blocks of 512 tokens of the prompt, the
last of which may be shorter; equal beginnings have equal ids (github.com/kvcache-ai/Mooncake, the folder
FAST25-release/traces).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from dalsegno.what_if.recorded_load import Asked, Part, Tokens
from shared.errors import ClientError
from shared.events import Inputs, Params, RequestSubmitted, encode
from shared.ids import RequestId
from shared.log.port import StoredRecord
from shared.subjects import Subjects

BLOCK: Final = 512
"""The tokens of a block."""
_MS: Final = 1_000_000


class TraceError(ClientError):
    """A file that is no trace, or a trace that cannot be used here."""

    code = "invalid_trace"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace. Other keys of its line are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []

    def __post_init__(self) -> None:
        if self.input_length < 1 or self.output_length < 0 or self.timestamp < 0:
            raise ValueError("expected input_length >= 1, output_length >= 0 and timestamp >= 0")
        blocks = -(-self.input_length // BLOCK)
        if self.hash_ids and len(self.hash_ids) != blocks:
            raise ValueError(
                f"expected {blocks} hash_ids, one per {BLOCK} tokens, found {len(self.hash_ids)}"
            )


def read(text: str, name: str) -> list[Call]:
    """Read a trace, in order of time.

    Raises:
        TraceError: a line is no request; names the line and what was expected.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=Call))
        except (msgspec.MsgspecError, ValueError) as error:
            raise TraceError(
                f"{name}, line {number}: expected a request of a Mooncake trace: {error}"
            ) from error
    if not found:
        raise TraceError(f"{name}: expected requests, one per line; found none")
    return sorted(found, key=lambda one: one.timestamp)


def lines_of(asked: Iterable[Asked]) -> Iterator[str]:
    """The trace of recorded requests: of those in whose steps a language model had one sequence."""
    begin_ns: int | None = None
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for one in asked:
        tokens = _tokens_of(one)
        if tokens is None:
            continue
        begin_ns = one.at_ns if begin_ns is None else begin_ns
        call = Call(
            timestamp=(one.at_ns - begin_ns) // _MS,
            input_length=len(tokens.prompt),
            output_length=tokens.generated,
            hash_ids=_hash_ids(tokens.prompt, known),
        )
        yield msgspec.json.encode(call).decode()


def _tokens_of(one: Asked) -> Tokens | None:
    found = [part for parts in one.parts.values() for part in parts.values() if len(part.sequences) == 1]
    return next(iter(found[0].sequences.values())) if len(found) == 1 else None


def _hash_ids(prompt: Sequence[int], known: dict[tuple[int, tuple[int, ...]], int]) -> list[int]:
    """The ids of a prompt's blocks: one id for each block behind one beginning."""
    found: list[int] = []
    for start in range(0, len(prompt), BLOCK):
        key = (found[-1] if found else -1, tuple(prompt[start : start + BLOCK]))
        found.append(known.setdefault(key, len(known)))
    return found


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
        node: Tokens(prompt=_prompt(call, number), generated=call.output_length) for node in part.sequences
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
    blocks = call.hash_ids or [-1 - number * call.input_length - one for one in range(call.input_length)]
    return [block * BLOCK + place for block in blocks for place in range(BLOCK)][: call.input_length]
