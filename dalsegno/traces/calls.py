"""Requests of a trace: when they came, and how long their prompts and answers were, or the texts. Pure."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from shared.errors import ClientError

BLOCK: Final = 512
"""The tokens of a block, where a format does not say."""
MAX_LENGTH: Final = 10_000_000
"""Of a prompt or an answer, in tokens: above any model's."""
_FINE: Final = 16
"""The tokens of a block of a prompt whose text is known."""
_SEED: Final = 0


class TraceError(ClientError):
    """A file that is no trace, or a trace that cannot be used here."""

    code = "invalid_trace"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request of known lengths.

    Attributes:
        timestamp: milliseconds from the beginning.
        input_length: tokens of the prompt.
        output_length: tokens of the answer.
        hash_ids: a name for each block of the prompt, the last of which may be shorter: prompts whose first
            names are equal begin with the same tokens. Empty: nothing is known to be shared.
        block: the tokens of a block.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.input_length < 1 or self.output_length < 0 or not 0 <= self.timestamp < math.inf:
            raise ValueError("expected input_length >= 1, output_length >= 0 and timestamp >= 0")
        if max(self.input_length, self.output_length) > MAX_LENGTH or self.block < 1:
            raise ValueError(f"expected lengths of at most {MAX_LENGTH:,} tokens, and blocks of at least 1")
        blocks = -(-self.input_length // self.block)
        if self.hash_ids and len(self.hash_ids) != blocks:
            raise ValueError(
                f"expected {blocks} hash_ids, one per {self.block} tokens, found {len(self.hash_ids)}"
            )


class TextCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose prompt is a text.

    Attributes:
        timestamp: milliseconds from the beginning; None if the format has no times.
        output_length: tokens of the answer; None if only `answer` tells, or nothing does.
        answer: the text that answered it.
        line: where it stands, for errors.
    """

    text: str
    timestamp: float | None = None
    output_length: int | None = None
    answer: str | None = None
    line: int = 0


AnyCall: TypeAlias = Call | TextCall


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace, in order of time.

    Attributes:
        form: the name of the format.
        left_out: requests that the trace has and that cannot be repeated, such as failed ones.
    """

    name: str
    form: str
    calls: list[AnyCall]
    left_out: int = 0


def timed(trace: Trace, rate: float | None) -> Trace:
    """Return the trace with a time for each request.

    Args:
        trace: a trace as it was read.
        rate: requests per second, at random distances (a Poisson process with a fixed seed); None: as they
            came, or all at once if the format has no times.

    Raises:
        TraceError: the format has times of its own.
    """
    draw = random.Random(_SEED)
    untimed = [isinstance(one, TextCall) and one.timestamp is None for one in trace.calls]
    if rate is not None and not all(untimed):
        raise TraceError(f"{trace.name}: its requests have times of their own; --rate is for traces without")
    at_ms, calls = 0.0, list[AnyCall]()
    for one in trace.calls:
        if isinstance(one, TextCall) and one.timestamp is None:
            calls.append(msgspec.structs.replace(one, timestamp=at_ms))
            at_ms += draw.expovariate(rate) * 1e3 if rate is not None else 0.0
        else:
            calls.append(one)
    first_ms = min(one.timestamp or 0.0 for one in calls)
    calls = [msgspec.structs.replace(one, timestamp=(one.timestamp or 0.0) - first_ms) for one in calls]
    return msgspec.structs.replace(trace, calls=sorted(calls, key=lambda one: one.timestamp or 0.0))


def counted(trace: Trace, tokens_of: Callable[[str], Sequence[int]]) -> list[Call]:
    """Return the requests of a timed trace by their lengths; texts become tokens.

    Raises:
        TraceError: nothing tells how long an answer is.
    """
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    found = []
    for one in trace.calls:
        if isinstance(one, Call):
            found.append(one)
            continue
        length = one.output_length
        if length is None and one.answer is not None:
            length = len(tokens_of(one.answer))
        if length is None:
            raise TraceError(
                f"{trace.name}, line {one.line}: expected the length of the answer "
                f"({_LENGTHS.get(trace.form, 'output_length')}), found none"
            )
        tokens = tokens_of(one.text) or [0]
        found.append(
            Call(
                timestamp=one.timestamp or 0.0,
                input_length=len(tokens),
                output_length=length,
                hash_ids=hash_ids(tokens, known, _FINE),
                block=_FINE,
            )
        )
    return found


_LENGTHS: Final = {"vllm": "output_tokens"}
"""The key for the length of an answer, where it is another one."""


def hash_ids(
    prompt: Sequence[int], known: dict[tuple[int, tuple[int, ...]], int], block: int = BLOCK
) -> list[int]:
    """Return the names of a prompt's blocks: one name for each block behind one beginning."""
    found: list[int] = []
    for start in range(0, len(prompt), block):
        key = (found[-1] if found else -1, tuple(prompt[start : start + block]))
        found.append(known.setdefault(key, len(known)))
    return found
