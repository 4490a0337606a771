"""Writing of traces. Pure."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from dalsegno.traces.calls import Call, TextCall

LengthFormat: TypeAlias = Literal["mooncake", "dynamo", "burstgpt"]
"""Formats with the lengths of prompts, and no texts."""
TextFormat: TypeAlias = Literal["vllm", "aiperf"]
"""Formats with the texts of prompts."""
WrittenFormat: TypeAlias = LengthFormat | TextFormat
LENGTHS: Final[tuple[LengthFormat, ...]] = get_args(LengthFormat)
TEXTS: Final[tuple[TextFormat, ...]] = get_args(TextFormat)
WRITTEN: Final[tuple[WrittenFormat, ...]] = (*LENGTHS, *TEXTS)


def lines_of(calls: Iterable[Call], form: LengthFormat, model: str) -> Iterator[str]:
    """Yield the lines of a trace of lengths; `model` is the name of the model that answered."""
    return _WRITERS[form](calls, model)


def lines_with_texts(calls: Iterable[TextCall], form: TextFormat) -> Iterator[str]:
    """Yield the lines of a trace with the texts of its prompts."""
    for one in calls:
        if form == "vllm":
            yield _json({"prompt": one.text, "output_tokens": one.output_length})
        else:
            yield _json({"text": one.text, "timestamp": one.timestamp, "output_length": one.output_length})


def _mooncake(calls: Iterable[Call], _: str) -> Iterator[str]:
    for one in calls:
        yield _json(
            {
                "timestamp": one.timestamp,
                "input_length": one.input_length,
                "output_length": one.output_length,
                "hash_ids": one.hash_ids,
            }
        )


def _dynamo(calls: Iterable[Call], model: str) -> Iterator[str]:
    for number, one in enumerate(calls):
        request = {
            "request_id": f"request-{number}",
            "model": model,
            "request_received_ms": one.timestamp,
            "input_tokens": one.input_length,
            "output_tokens": one.output_length,
            "replay": {
                "trace_block_size": one.block,
                "input_length": one.input_length,
                "input_sequence_hashes": one.hash_ids,
            },
        }
        yield _json({"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request})


def _burstgpt(calls: Iterable[Call], model: str) -> Iterator[str]:
    yield "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    # A comma or a quote in a name would need a quoted field, which not every reader of this format knows.
    name = model.translate({ord(one): "_" for one in ',"\r\n'})
    for one in calls:
        total = one.input_length + one.output_length
        yield f"{one.timestamp / 1e3:.3f},{name},{one.input_length},{one.output_length},{total},API log"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_WRITERS: Final[dict[LengthFormat, Callable[[Iterable[Call], str], Iterator[str]]]] = {
    "mooncake": _mooncake,
    "dynamo": _dynamo,
    "burstgpt": _burstgpt,
}
