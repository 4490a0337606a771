"""Reading of traces: the formats, and how each is recognised.

    mooncake   github.com/kvcache-ai/Mooncake, FAST25-release/traces; also aiperf's mooncake_trace
               {"timestamp": 1500, "input_length": 1040, "output_length": 87, "hash_ids": [0, 1, 2]}
    dynamo     NVIDIA Dynamo, schema dynamo.request.trace.v1, bare or in {"timestamp", "event"}; records of
               other types than request_end are passed over
    burstgpt   github.com/HPMLL/BurstGPT, a CSV file; requests without an answer failed, and are left out
               Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    vllm       `vllm bench`, dataset `custom`
               {"prompt": "...", "output_tokens": 87}
    sharegpt   `vllm bench`, dataset `sharegpt`: the first two turns of each conversation
               [{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]
    aiperf     NVIDIA AIPerf, dataset `single_turn`
               {"text": "...", "timestamp": 1500, "output_length": 87}

Lengths are in tokens and times in milliseconds, but those of BurstGPT, which are in seconds. Other keys are
ignored. A file may be compressed by gzip.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from dalsegno.traces.calls import AnyCall, Call, TextCall, Trace, TraceError

Format: TypeAlias = Literal["mooncake", "dynamo", "burstgpt", "vllm", "sharegpt", "aiperf"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
SUFFIXES: Final = (".jsonl", ".json", ".csv", ".gz")
"""Of the files that hold traces."""
MAX_BYTES: Final = 1 << 31
"""Of a file, uncompressed."""
_GZIP: Final = b"\x1f\x8b"
_BURSTGPT: Final = ("Timestamp", "Request tokens", "Response tokens")
_DYNAMO: Final = "dynamo.request.trace."


def read(path: Path, form: Format | None = None) -> Trace:
    """Read a trace; `form` is recognised by the contents if it is not given.

    Raises:
        TraceError: it cannot be read, or is no trace; names the line and what was expected.
    """
    try:
        text = _bytes_of(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: expected UTF-8: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    return parsed(text, str(path), form)


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        with gzip.open(file) if is_compressed else file as contents:
            found = contents.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise TraceError(f"{path}: expected a trace of at most {MAX_BYTES:,} bytes, found more")
    return found


def parsed(text: str, name: str, form: Format | None = None) -> Trace:
    """Return the trace in a text.

    Raises:
        TraceError: it is none; names the line and what was expected.
    """
    chosen = form or _recognised(text, name)
    calls = list[AnyCall]()
    left_out = 0
    for one in _READERS[chosen](text, name):
        if one is None:
            left_out += 1
        else:
            calls.append(one)
    if not calls:
        raise TraceError(f"{name}: expected requests in the format {chosen}; found none")
    return Trace(name=name, form=chosen, calls=calls, left_out=left_out)


def _recognised(text: str, name: str) -> Format:
    first = next((line for line in io.StringIO(text) if line.strip()), "").strip()
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        keys = _object(first, name, 1)
        for form, is_it in _KEYS.items():
            if is_it(keys):
                return form
        raise TraceError(
            f"{name}, line 1: expected a request in one of the formats {', '.join(FORMATS)}; found the keys "
            f"{', '.join(map(repr, list(keys)[:8])) or 'none'}"
        )
    if all(column in first for column in _BURSTGPT):
        return "burstgpt"
    raise TraceError(
        f"{name}, line 1: expected JSON lines, a list of conversations, or a CSV file with the columns "
        f"{', '.join(_BURSTGPT)}; found {first[:40]!r}"
    )


_KEYS: Final[dict[Format, Callable[[dict[str, Any]], bool]]] = {
    "dynamo": lambda keys: str(_inner(keys).get("schema", "")).startswith(_DYNAMO),
    "mooncake": lambda keys: "input_length" in keys,
    "vllm": lambda keys: "prompt" in keys,
    "aiperf": lambda keys: "text" in keys or "texts" in keys or "turns" in keys,
}
"""How a line of JSON is recognised, in this order."""


def _inner(keys: dict[str, Any]) -> dict[str, Any]:
    """A record of Dynamo without the envelope of a file."""
    event = keys.get("event")
    return event if isinstance(event, dict) else keys


# ---- formats -------------------------------------------------------------------------------------------


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _mooncake(text: str, name: str) -> Iterator[Call]:
    for number, one in _lines(text, name, _Mooncake):
        yield _call(name, number, one.timestamp, one.input_length, one.output_length, one.hash_ids)


class _Replay(msgspec.Struct):
    input_length: int
    trace_block_size: int = 1
    input_sequence_hashes: list[int] = []


class _DynamoRequest(msgspec.Struct):
    output_tokens: int
    request_received_ms: float
    replay: _Replay | None = None
    input_tokens: int | None = None


class _DynamoRecord(msgspec.Struct):
    request: _DynamoRequest


def _dynamo(text: str, name: str) -> Iterator[Call]:
    names: dict[int, int] = {}
    for number, line in _json_lines(text):
        record = _inner(_object(line, name, number))
        if record.get("event_type") != "request_end":
            continue
        one = _converted(record, _DynamoRecord, name, number).request
        replay = one.replay or _Replay(input_length=one.input_tokens or 0)
        ids = [names.setdefault(hashed, len(names)) for hashed in replay.input_sequence_hashes]
        at_ms = one.request_received_ms
        yield _call(name, number, at_ms, replay.input_length, one.output_tokens, ids, replay.trace_block_size)


def _burstgpt(text: str, name: str) -> Iterator[Call | None]:
    rows = csv.DictReader(io.StringIO(text))
    try:
        columns = rows.fieldnames or []
    except csv.Error as error:
        raise TraceError(f"{name}, line 1: expected a line of a CSV file: {error}") from error
    if missing := [column for column in _BURSTGPT if column not in columns]:
        raise TraceError(
            f"{name}, line 1: expected the columns {', '.join(_BURSTGPT)}; {missing[0]} is missing"
        )
    for row in _rows(rows, name):
        number = rows.line_num
        try:
            at_s, given, made = float(row[_BURSTGPT[0]]), int(row[_BURSTGPT[1]]), int(row[_BURSTGPT[2]])
        except (TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{name}, line {number}: expected numbers: {error}") from error
        yield _call(name, number, at_s * 1e3, given, made, []) if given and made else None


def _rows(rows: "csv.DictReader[str]", name: str) -> Iterator[dict[str, str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise TraceError(f"{name}, line {rows.line_num}: expected a line of a CSV file: {error}") from error


class _Vllm(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


def _vllm(text: str, name: str) -> Iterator[TextCall]:
    for number, one in _lines(text, name, _Vllm):
        yield _text_call(name, number, one.prompt, None, one.output_tokens)


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]


def _sharegpt(text: str, name: str) -> Iterator[TextCall | None]:
    try:
        found = msgspec.json.decode(text, type=list[_Conversation])
    except (msgspec.MsgspecError, ValueError) as error:
        raise TraceError(f"{name}: expected a list of conversations as ShareGPT has them: {error}") from error
    for number, one in enumerate(found, 1):
        turns = [turn.value for turn in one.conversations]
        is_whole = len(turns) > 1 and turns[0].strip() and turns[1].strip()
        yield TextCall(text=turns[0], answer=turns[1], line=number) if is_whole else None


class _Aiperf(msgspec.Struct):
    text: str | None = None
    texts: list[str] | None = None
    timestamp: float | None = None
    output_length: int | None = None
    turns: Any = None


def _aiperf(text: str, name: str) -> Iterator[TextCall]:
    for number, one in _lines(text, name, _Aiperf):
        if one.turns is not None:
            raise TraceError(
                f"{name}, line {number}: expected a single turn; turns that wait for an answer are not "
                "repeated: write each with its text and timestamp"
            )
        prompt = one.text if one.text is not None else "\n".join(one.texts or [])
        yield _text_call(name, number, prompt, one.timestamp, one.output_length)


_READERS: Final[dict[Format, Callable[[str, str], Iterable[AnyCall | None]]]] = {
    "mooncake": _mooncake,
    "dynamo": _dynamo,
    "burstgpt": _burstgpt,
    "vllm": _vllm,
    "sharegpt": _sharegpt,
    "aiperf": _aiperf,
}
"""They yield None for a request that cannot be repeated."""


# ---- lines -----------------------------------------------------------------------------------------------


def _json_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(io.StringIO(text), 1):
        if line.strip():
            yield number, line


def _lines(text: str, name: str, kind: type[Any]) -> Iterator[tuple[int, Any]]:
    for number, line in _json_lines(text):
        yield number, _converted(_object(line, name, number), kind, name, number)


def _object(line: str, name: str, number: int) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TraceError(f"{name}, line {number}: expected a JSON object: {error}") from error


def _converted(value: Any, kind: type[Any], name: str, number: int) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TraceError(f"{name}, line {number}: {error}") from error


def _call(
    name: str, number: int, at_ms: float, given: int, made: int, ids: list[int], block: int | None = None
) -> Call:
    lengths: dict[str, Any] = {"timestamp": at_ms, "input_length": given, "output_length": made}
    blocks = {} if block is None else {"block": block}
    try:
        return Call(**lengths, hash_ids=ids, **blocks)
    except ValueError as error:
        raise TraceError(f"{name}, line {number}: {error}") from error


def _text_call(name: str, number: int, prompt: str, at_ms: float | None, made: int | None) -> TextCall:
    if not prompt.strip():
        raise TraceError(f"{name}, line {number}: expected a text, found none")
    if (at_ms is not None and at_ms < 0) or (made is not None and made < 1):
        raise TraceError(f"{name}, line {number}: expected a timestamp >= 0 and a length >= 1")
    return TextCall(text=prompt, timestamp=at_ms, output_length=made, line=number)
