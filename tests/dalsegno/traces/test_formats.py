"""Each format is recognised by its contents and read; what is none is named with its line."""

import contextlib
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dalsegno.traces import formats
from dalsegno.traces.calls import Call, TextCall, TraceError
from dalsegno.traces.formats import FORMATS, parsed, read

MOONCAKE = '{"timestamp": 1500, "input_length": 1040, "output_length": 87, "hash_ids": [0, 1, 2], "x": 1}\n'
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45.5,GPT-4,100,0,100,API log\n"
    "46,GPT-4,7,9,16,API log\n"
)
NEWER_BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,s1,1.5,ChatGPT,472,18,490,Conversation log\n"
)
VLLM = '{"prompt": "What is len?", "output_tokens": 12}\n{"prompt": "And abs?"}\n'
SHAREGPT = json.dumps(
    [
        {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"id": "b", "conversations": [{"from": "human", "value": "no answer"}]},
    ]
)
AIPERF = '{"text": "Explain it.", "timestamp": 20, "output_length": 200}\n{"texts": ["a", "b"]}\n'


def dynamo(received_ms: int, hashes: list[int], *, wrapped: bool = False) -> str:
    record = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": received_ms + 10,
        "request": {
            "request_id": f"r{received_ms}",
            "request_received_ms": received_ms,
            "output_tokens": 4,
            "replay": {
                "trace_block_size": 64,
                "input_length": 64 * len(hashes),
                "input_sequence_hashes": hashes,
            },
        },
    }
    return json.dumps({"timestamp": 1, "event": record} if wrapped else record) + "\n"


TOOL = json.dumps({"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}}) + "\n"


def test_mooncake() -> None:
    assert parsed(MOONCAKE, "t").calls == [
        Call(timestamp=1500, input_length=1040, output_length=87, hash_ids=[0, 1, 2])
    ]


@pytest.mark.parametrize("wrapped", [False, True])
def test_dynamo_with_short_names_for_its_hashes(wrapped: bool) -> None:
    large = 2**63 + 5
    text = dynamo(1_000, [large, 7], wrapped=wrapped) + TOOL + dynamo(3_000, [large], wrapped=wrapped)
    found = parsed(text, "t")
    assert found.form == "dynamo"
    assert found.calls == [
        Call(timestamp=1_000, input_length=128, output_length=4, hash_ids=[0, 1], block=64),
        Call(timestamp=3_000, input_length=64, output_length=4, hash_ids=[0], block=64),
    ]


def test_burstgpt_in_seconds_without_failed_requests() -> None:
    found = parsed(BURSTGPT, "t")
    assert (found.form, found.left_out) == ("burstgpt", 1)
    assert found.calls == [
        Call(timestamp=5_000, input_length=472, output_length=18),
        Call(timestamp=46_000, input_length=7, output_length=9),
    ]
    assert parsed(NEWER_BURSTGPT, "t").calls == found.calls[:1]


def test_vllm() -> None:
    found = parsed(VLLM, "t")
    assert found.form == "vllm"
    assert found.calls == [
        TextCall(text="What is len?", output_length=12, line=1),
        TextCall(text="And abs?", line=2),
    ]


def test_sharegpt_without_conversations_of_one_turn() -> None:
    found = parsed(SHAREGPT, "t")
    assert (found.form, found.left_out) == ("sharegpt", 1)
    assert found.calls == [TextCall(text="Hi", answer="Hello.", line=1)]


def test_aiperf() -> None:
    found = parsed(AIPERF, "t")
    assert found.form == "aiperf"
    assert found.calls == [
        TextCall(text="Explain it.", timestamp=20, output_length=200, line=1),
        TextCall(text="a\nb", line=2),
    ]


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_file_may_be_compressed_and_begin_with_a_byte_order_mark(
    tmp_path: Path, is_compressed: bool
) -> None:
    data = b"\xef\xbb\xbf" + BURSTGPT.encode()
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress(data) if is_compressed else data)
    assert len(read(path).calls) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: expected JSON lines"),
        ("nonsense", "found 'nonsense'"),
        ("{}", "found the keys none"),
        ('{"a": 1}', "found the keys 'a'"),
        ('{"input_length": 5}', "line 1: Object missing required field `timestamp`"),
        (MOONCAKE + "{", "line 2: expected a JSON object"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length >= 1"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp >= 0"),
        ('{"timestamp": 1, "input_length": 100000000000, "output_length": 1}', "at most 10,000,000 tokens"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "expected 2 hash_ids"),
        ('{"prompt": " "}', "expected a text"),
        ('{"prompt": 5}', r"Expected `str`, got `int` - at `\$.prompt`"),
        ('{"text": "a", "output_length": 0}', "a length >= 1"),
        ('{"session_id": "s", "turns": []}', "expected a single turn"),
        ("[", "expected a list of conversations"),
        ("[]", "expected requests in the format sharegpt; found none"),
        (TOOL, "expected requests in the format dynamo; found none"),
        (TOOL.replace("tool_end", "request_end"), "line 1: Object missing required field `request`"),
        (BURSTGPT + "soon,x,1,1,2,y\n", "line 5: expected numbers: could not convert"),
        (BURSTGPT + "nan,x,1,1,2,y\n", "line 5: expected input_length >= 1"),
        (BURSTGPT + "7\n", "line 5: expected numbers"),
        (BURSTGPT + f"7,{'x' * 200_000},1,1,2,y\n", "line 4: expected a line of a CSV file: field larger"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        parsed(text, "t")


def test_a_named_format_is_not_guessed() -> None:
    with pytest.raises(TraceError, match="line 1: Object missing required field `prompt`"):
        parsed(MOONCAKE, "t", "vllm")
    with pytest.raises(TraceError, match=r"expected the columns Timestamp, .*; Timestamp is missing"):
        parsed(MOONCAKE, "t", "burstgpt")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfe", "expected UTF-8"),
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot read .*trace.jsonl"),
        (gzip.compress(b"{}", mtime=0)[:12] + b"\xff\xff\xff\xff", "cannot read .*trace.jsonl"),
    ],
)
def test_a_damaged_file_is_one_error(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=says):
        read(path)
    with pytest.raises(TraceError, match="cannot read"):
        read(tmp_path / "none.jsonl")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_BYTES", 100)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 1000))
    with pytest.raises(TraceError, match="at most 100 bytes, found more"):
        read(path)


@pytest.mark.slow
@given(st.text(max_size=200), st.sampled_from([None, *FORMATS]))
@example("\r0", "burstgpt")
def test_any_text_is_a_trace_or_refused(text: str, form: formats.Format | None) -> None:
    for candidate in (text, MOONCAKE + text, BURSTGPT + text, dynamo(1, [1]) + text, VLLM + text):
        with contextlib.suppress(TraceError):
            assert parsed(candidate, "t", form).calls
