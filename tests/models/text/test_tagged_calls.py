"""Calls between tags: what a parser reads, the types of values, and what a grammar allows."""

import json
from typing import Any

import pytest

from models.text.tagged_calls import is_text
from models.text.tool_call_parser import ToolCallParser
from models.text.tool_calls import GLM, QWEN3_CODER, CallFormat, guide_for
from shared.errors import ClientError
from tests.models.text.test_tool_call_parser import told
from tests.models.text.test_tool_calls import allows, inputs

CITY, DAYS = "<parameter=city>\n", "<parameter=days>\n"
END = "\n</parameter>\n"
BEGIN, CLOSE = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
NONE = "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"
FIRST = "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>"
SECOND = "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>"


@pytest.mark.parametrize(
    ("written", "text", "content", "calls"),
    [
        (QWEN3_CODER, f"{BEGIN}{CITY}Ulm{END}{DAYS}3{END}{CLOSE}", "", [("f", '{"city": "Ulm", "days": 3}')]),
        (QWEN3_CODER, f'{BEGIN}{CITY}"<b>"\n</par{END}{CLOSE}', "", [("f", '{"city": "\\"<b>\\"\\n</par"}')]),
        (QWEN3_CODER, f"{BEGIN}{CITY}\n  a\n\n{END}{CLOSE}", "", [("f", '{"city": "\\n  a\\n\\n"}')]),
        (QWEN3_CODER, f"{BEGIN}{CITY}{END}{CLOSE}", "", [("f", '{"city": ""}')]),
        (QWEN3_CODER, f"{BEGIN}{DAYS}many{END}{CLOSE} x", " x", [("f", '{"days": "many"}')]),
        (QWEN3_CODER, f"{BEGIN}{DAYS}NaN{END}{CLOSE}", "", [("f", '{"days": "NaN"}')]),
        (QWEN3_CODER, f"{BEGIN}<parameter=x>\n5{END}{CLOSE}", "", [("f", '{"x": "5"}')]),
        (QWEN3_CODER, f'{BEGIN}<parameter=tags>\n["a"]{END}{CLOSE}', "", [("f", '{"tags": ["a"]}')]),
        (QWEN3_CODER, f"See.\n{NONE}\n{BEGIN}{CLOSE}\n", "See.", [("get_weather", "{}"), ("f", "{}")]),
        (QWEN3_CODER, f"{BEGIN}{CITY}Ul", "", [("f", '{"city": "Ul')]),
        (QWEN3_CODER, f"{BEGIN}no tags", "\nno tags", [("f", "{}")]),
        (QWEN3_CODER, "a <tool_call> b", "a <tool_call> b", []),
        (QWEN3_CODER, "<tool_call><function=a b>", "<tool_call><function=a b>", []),
        (QWEN3_CODER, "<tool_call>\n<function=f", "<tool_call>\n<function=f", []),
        (GLM, f"{FIRST}Ulm\n{SECOND}3</arg_value>\n</tool_call>", "",
         [("f", '{"city": "Ulm\\n", "days": 3}')]),
        (GLM, "So.\n<tool_call>f</tool_call>\n<tool_call>get_weather\n</tool_call>", "So.",
         [("f", "{}"), ("get_weather", "{}")]),
        (GLM, "<tool_call>not a name</tool_call>", "<tool_call>not a name</tool_call>", []),
    ],
)  # fmt: skip
def test_text_is_separated_from_calls(
    written: CallFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert told(written, [text]) == (content, calls)
    assert told(written, list(text)) == (content, calls)
    for place in range(len(text)):
        assert told(written, [text[:place], text[place:]]) == (content, calls)


def test_a_string_is_emitted_as_it_is_written() -> None:
    reader = ToolCallParser(QWEN3_CODER, {"f": {"properties": {"city": {"type": "string"}}}})
    reader.push(f"{BEGIN}{CITY}")

    pieces = [next(iter(reader.push(text).calls.values())).arguments for text in ("Ulm", " and\n", "more")]

    assert pieces == ["Ulm", " and", "\\nmore"]


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (None, True), ({}, True), ({"type": "string"}, True), ({"enum": ["a", "b"]}, True),
        ({"const": "a"}, True),
        ({"type": "integer"}, False), ({"type": ["string", "null"]}, False), ({"enum": ["a", 1]}, False),
        ({"anyOf": [{"type": "string"}]}, False),
    ],
)  # fmt: skip
def test_a_schema_says_whether_a_value_is_a_text(schema: Any, found: bool) -> None:
    assert is_text(schema) is found


def written_as(written: CallFormat, name: str, arguments: dict[str, str]) -> str:
    if written is GLM:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{pairs}</tool_call>"
    pairs = "".join(f"<parameter={k}>\n{v}{END}" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}{CLOSE}"


@pytest.mark.parametrize("written", [QWEN3_CODER, GLM])
def test_a_forced_call_follows_its_schema(written: CallFormat) -> None:
    function = {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "size": {"$ref": "#/$defs/size"},
                "more": {"type": "array", "items": {"type": "boolean"}},
            },
            "required": ["text"],
            "$defs": {"size": {"type": "integer", "minimum": 1}},
        },
    }
    guide = guide_for(written, inputs(function, tool_choice="required"), None)

    assert allows(guide, written_as(written, "f", {"text": 'a <b>\n"c"', "size": "3", "more": "[true]"}))
    assert allows(guide, written_as(written, "f", {"text": ""}))
    assert not allows(guide, written_as(written, "f", {"size": "3"}))
    assert not allows(guide, written_as(written, "f", {"text": "a", "size": "0"}))
    assert not allows(guide, written_as(written, "f", {"text": "a", "other": "b"}))


def test_a_rule_that_a_text_without_quotes_cannot_follow_is_refused() -> None:
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^b$"}}},
    }

    with pytest.raises(ClientError, match="parameters of f: a: this model writes strings without quotes"):
        guide_for(QWEN3_CODER, inputs(function, tool_choice="required"), None)
    assert guide_for(QWEN3_CODER, inputs(function), None) is None


@pytest.mark.parametrize("written", [QWEN3_CODER, GLM])
def test_any_value_comes_back(written: CallFormat) -> None:
    values = {"a": "x", "b": "5", "c": '{"d": 1}'}
    reader = ToolCallParser(
        written, {"f": {"properties": {"b": {"type": "integer"}, "c": {"type": "object"}}}}
    )

    [piece] = reader.push(written_as(written, "f", values)).calls.values()

    assert json.loads(piece.arguments) == {"a": "x", "b": 5, "c": {"d": 1}}
