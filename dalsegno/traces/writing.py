"""Writing of traces: those formats that hold lengths, and no texts. Pure."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from dalsegno.traces.calls import Call

WrittenFormat: TypeAlias = Literal["mooncake", "dynamo", "burstgpt"]
WRITTEN: Final[tuple[WrittenFormat, ...]] = get_args(WrittenFormat)


def lines_of(calls: Iterable[Call], form: WrittenFormat, model: str) -> Iterator[str]:
    """Yield the lines of a trace; `model` is the name of the model that answered."""
    return _WRITERS[form](calls, model)


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


_WRITERS: Final[dict[WrittenFormat, Callable[[Iterable[Call], str], Iterator[str]]]] = {
    "mooncake": _mooncake,
    "dynamo": _dynamo,
    "burstgpt": _burstgpt,
}
