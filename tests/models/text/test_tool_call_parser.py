"""Tool calls in a text, independent of how it is cut into pieces."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.tool_call_parser import ParsedPiece, ToolCallParser, call_id
from models.text.tool_calls import (
    DEEPSEEK,
    FORMATS,
    GEMMA,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    CallFormat,
)

SCHEMA = {"properties": {"days": {"type": "integer"}, "tags": {"type": "array"}, "city": {"type": "string"}}}
NAMES: dict[str, dict[str, Any]] = {"f": SCHEMA, "get_weather": {}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{<tool_call>", "b": [1, {"c": 2}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}\\"{<tool_call>", "b": [1, {"c": 2}]}'


def told(written: CallFormat, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer; the order of the parts of a call is asserted here."""
    reader = ToolCallParser(written, NAMES)
    content, calls = "", dict[int, list[str]]()

    def take(said: ParsedPiece) -> None:
        nonlocal content
        content += said.content
        for index, piece in said.calls.items():
            assert (piece.name is not None) == (index not in calls), "the name comes first, and once"
            calls.setdefault(index, [piece.name or "", ""])[1] += piece.arguments

    for piece in pieces:
        take(reader.push(piece))
    take(reader.end())
    assert list(calls) == list(range(len(calls)))
    assert reader.count == len(calls)
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize(
    ("written", "text", "content", "calls"),
    [
        (HERMES, "", "", []),
        (HERMES, " a  b\n", " a  b\n", []),
        (HERMES, CALL, "", [("f", ARGUMENTS)]),
        (HERMES, f"See. \n{CALL}\n{CALL}\n", "See.", [("f", ARGUMENTS)] * 2),
        (HERMES, f"{CALL} Done.", " Done.", [("f", ARGUMENTS)]),
        (HERMES, "a <tool_call> b", "a <tool_call> b", []),
        (HERMES, "a <tool_", "a <tool_", []),
        (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
        (HERMES, '<tool_call><tool_call>{"name": "f"}', "<tool_call>", [("f", "{}")]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"type": "function", "name": "f", "arguments": {}}', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> x', " x", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        (HERMES, '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
        (HERMES, CALL.removesuffix("_call>"), "", [("f", ARGUMENTS)]),
        (HERMES, '<tool_call>{"name": "unheard_of"}</tool_call>', "", [("unheard_of", "{}")]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "get_weather", "arguments": {}}]',
         "", [("f", "{}"), ("get_weather", "{}")]),
        (MISTRAL, 'So. [TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}] x', "So. x",
         [("f", '{"a": [1]}')]),
        (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", [("f", "{}")] * 2),
        (LLAMA, '{"name": "unheard_of", "parameters": {}}', '{"name": "unheard_of", "parameters": {}}', []),
        (LLAMA, '{"name": "f", "age": 5}', '{"name": "f", "age": 5}', []),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": [1]}[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{}', "",
         [("f", '{"a": [1]}'), ("get_weather", "{}")]),
        (MISTRAL_ARGS, "[TOOL_CALLS]f(1)", "[TOOL_CALLS]f(1)", []),
        (MISTRAL_ARGS, "[TOOL_CALLS] [ARGS]{}", "[TOOL_CALLS] [ARGS]{}", []),
        (HARMONY, 'So.<|channel|>commentary to=functions.f code<|message|>{"a": 1}<|call|>', "So.<|call|>",
         [("f", '{"a": 1}')]),
        (GEMMA, ('<|tool_call>call:f{a:<|"|>x "<|y\n<|"|>,b:[1,-2.5,true,None],c:{<|"|>d e<|"|>:{}},e:"é"}'
         "<tool_call|> Done."), " Done.",
         [("f", '{"a": "x \\"<|y\\n", "b": [1, -2.5, true, null], "c": {"d e": {}}, "e": "é"}')]),
        (GEMMA, '<|tool_call>call:f{"a": "x, {", b : 1 }<tool_call|>', "", [("f", '{"a": "x, {", "b": 1}')]),
        (GEMMA, "<|tool_call>call:f<tool_call|>", "<|tool_call>call:f<tool_call|>", []),
        (GEMMA, '<|tool_call>call:f{a:<|"|>x', "", [("f", '{"a": "x')]),
        (DEEPSEEK, ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n"
         "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>."), ".", [("f", "{}")]),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", []),
        (LLAMA, 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ],
)  # fmt: skip
def test_text_is_separated_from_calls(
    written: CallFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert told(written, [text]) == (content, calls)
    assert told(written, list(text)) == (content, calls)
    for place in range(len(text)):
        assert told(written, [text[:place], text[place:]]) == (content, calls)


MARKS = sorted(
    {mark for known in FORMATS.values() for mark in known.visible}
    | {
        part
        for known in FORMATS.values()
        if known.named is not None
        for part in (known.named.opens_name, known.named.closes_name, known.named.closes_arguments)
        if part
    }
    | {
        part
        for known in FORMATS.values()
        if known.tags is not None
        for part in (known.tags.opens_name, known.tags.closes_call, known.tags.opens_key, *known.tags.kinds)
        if part
    }
)
_WORDS = st.sampled_from(
    [
        *'{}[]",:\\ \n<>a1;', "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '"name"',
        '"f"',
        '"arguments"', '"parameters"', ": ", CALL, '{"name": "f", "parameters": {"a": "b"}}',
        '[{"name": "f", "arguments": {}}]',
        "<function=f>", "</function>", "<parameter=city>", "</parameter>", "f", "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>", *MARKS,
    ]
)  # fmt: skip


@pytest.mark.slow
@given(
    written=st.sampled_from(list(FORMATS.values())),
    words=st.lists(_WORDS, max_size=30),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_result_does_not_depend_on_the_pieces(
    written: CallFormat, words: list[str], cuts: list[int]
) -> None:
    text = "".join(words)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]

    whole = told(written, [text])

    assert told(written, pieces) == whole
    assert told(written, list(text)) == whole


@given(st.text(alphabet="ab <tool_call>{}\n", max_size=80))
def test_text_that_is_no_call_is_emitted_unchanged(text: str) -> None:
    content, calls = told(HERMES, [text])

    assert calls or content == text


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(arguments=st.dictionaries(st.text(max_size=8), _JSON, max_size=4), indent=st.sampled_from([None, 2]))
def test_arguments_come_as_they_were_written(arguments: dict[str, object], indent: int | None) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'

    assert told(HERMES, [text]) == ("", [("f", written)])


def test_a_name_is_emitted_before_its_call_is_complete() -> None:
    reader = ToolCallParser(HERMES, NAMES)

    assert reader.push('<tool_call>\n{"name": "f", "argu') == ParsedPiece()
    begun = reader.push('ments": {"a": ')
    more = reader.push("5")

    assert [(piece.name, piece.arguments) for piece in begun.calls.values()] == [("f", '{"a": ')]
    assert [(piece.name, piece.arguments) for piece in more.calls.values()] == [(None, "5")]


def test_unbounded_white_space_is_not_held_back() -> None:
    reader = ToolCallParser(HERMES, NAMES)

    assert len(reader.push(" " * 5000).content) > 4000


def test_ids_are_the_calls_own_and_as_its_model_takes_them() -> None:
    ids = {
        call_id(request, choice, index, HERMES) for request in "ab" for choice in (0, 1) for index in (0, 1)
    }
    short = call_id("a", 0, 0, MISTRAL)

    assert len(ids) == 8
    assert call_id("a", 0, 0, HERMES) in ids
    assert len(short) == 9
    assert short.isalnum()
