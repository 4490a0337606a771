"""Formats of tool calls: detection in templates, and the grammars of answers."""

import json
from typing import Any

import llguidance
import msgspec
import pytest

from models.text.tool_call_parser import ToolCallParser
from models.text.tool_calls import (
    DEEPSEEK,
    DEEPSEEK_V3_1,
    DEEPSEEK_V3_2,
    DEEPSEEK_V4,
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    CallFormat,
    format_in,
    guide_for,
    offered,
)
from shared.errors import ClientError
from shared.events import Guide, Inputs
from tests.models.text.written_calls import written_calls

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rom"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST = {"name": "forecast", "description": "How it will be.", "parameters": SCHEMA}
GOOD = '{"city": "Ulm", "days": 3}'
BAD = '{"city": "Bern", "days": 3}'
NOW = {"name": "now"}
_TOKENS = llguidance.LLTokenizer("byte")


def inputs(*functions: dict[str, Any], **change: Any) -> Inputs:
    tools = [{"type": "function", "function": function} for function in functions or (FORECAST, NOW)]
    messages = [{"role": "user", "content": "x"}]
    return msgspec.convert({"messages": messages, "tools": tools, **change}, Inputs)


def allows(guide: Guide | None, text: str) -> bool:
    """True if a text is a complete answer by a guide."""
    assert guide is not None
    assert guide.grammar is not None
    matcher = llguidance.LLMatcher(_TOKENS, guide.grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = _TOKENS.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(written: CallFormat, arguments: str, name: str = "forecast", count: int = 1) -> str:
    """A text with calls, as a model writes them."""
    return written_calls(written, json.loads(arguments), name, count)


ALL = pytest.mark.parametrize("written", FORMATS.values(), ids=list(FORMATS))
SEVERAL = pytest.mark.parametrize(
    "written", [found for found in FORMATS.values() if found.separator is not None]
)


# ---- detection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ '<tool_call>' }}{{ tools }}{{ '</tool_call>' }}", HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{% if tools %}{{ '<|python_tag|>' }}{% endif %}", LLAMA),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', LLAMA),
        ("<tool_call>\\n<function=example_function_name>\\n</function>\\n</tool_call>", QWEN3_CODER),
        ("<tool_call>{name}\\n<arg_key>{key}</arg_key></tool_call>", GLM),
        ("[TOOL_CALLS]name[ARGS]{}", MISTRAL_ARGS),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\\n```json\\n", DEEPSEEK),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>", DEEPSEEK_V3_1),
        ("<|start|>assistant to=functions.name<|channel|>commentary json<|message|>", HARMONY),
        ("<|tool_call>call:name{}<tool_call|>", GEMMA),
        ("<start_function_call>call:name{}<end_function_call>", FUNCTION_GEMMA),
        ("<minimax:tool_call>\\n<invoke name=''></minimax:tool_call>", MINIMAX),
        ("{% set token = '｜DSML｜' %}{{ '<' + token + 'function_calls>' }}", DEEPSEEK_V3_2),
        ("{% set token = '｜DSML｜' %}{{ '<' + token + 'tool_calls>' }}", DEEPSEEK_V4),
        ("{% set token = ']<]minimax[>[' %}{{ token + '<tool_call>' + token + '</tool_call>' }}", None),
        ("{{ tools }}", None),
    ],
)
def test_a_template_says_how_calls_are_written(source: str, written: CallFormat | None) -> None:
    assert format_in(source) is written


def test_a_template_is_told_what_the_model_may_know() -> None:
    assert offered(inputs(tool_choice="none")) is None
    assert offered(Inputs(text="x")) is None
    assert offered(inputs({**FORECAST, "strict": True}, NOW)) == [
        {"type": "function", "function": FORECAST},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]


# ---- grammars ------------------------------------------------------------------------------------


@ALL
def test_where_a_call_is_required_there_is_one_and_it_is_valid(written: CallFormat) -> None:
    guide = guide_for(written, inputs(tool_choice="required"), None)

    assert allows(guide, call(written, GOOD))
    assert allows(guide, call(written, "{}", "now"))
    assert not allows(guide, "")
    assert not allows(guide, "It rains.")
    assert not allows(guide, call(written, BAD))
    assert not allows(guide, call(written, GOOD, "now"))
    assert not allows(guide, call(written, GOOD, "unheard_of"))
    assert not allows(guide, f"Well, {call(written, GOOD)}")


@ALL
def test_a_named_function_is_called_once(written: CallFormat) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    guide = guide_for(written, inputs(tool_choice=choice), None)

    assert allows(guide, call(written, "{}", "now"))
    assert not allows(guide, call(written, GOOD))
    assert not allows(guide, call(written, "{}", "now", count=2))


@SEVERAL
def test_several_calls_are_made_unless_the_client_wants_one(written: CallFormat) -> None:
    several = guide_for(written, inputs(tool_choice="required"), None)
    one = guide_for(written, inputs(tool_choice="required", parallel_tool_calls=False), None)

    assert allows(several, call(written, GOOD, count=3))
    assert allows(one, call(written, GOOD))
    assert not allows(one, call(written, GOOD, count=2))


@ALL
def test_where_the_model_chooses_all_is_free_unless_a_function_is_strict(written: CallFormat) -> None:
    strict = guide_for(written, inputs({**FORECAST, "strict": True}, NOW), None)

    assert guide_for(written, inputs(), None) is None
    for text in ("", "It rains.\n", "a < b", call(written, GOOD), call(written, '{"a": [1]}', "now")):
        assert allows(strict, text), text
    assert not allows(strict, call(written, BAD))
    assert not allows(strict, call(written, "{}", "unheard_of"))


@SEVERAL
def test_a_strict_function_may_be_called_behind_text(written: CallFormat) -> None:
    guide = guide_for(written, inputs({**FORECAST, "strict": True}), None)

    assert allows(guide, f"Let me see. {call(written, GOOD)}")
    assert allows(guide, f"Let me see. {call(written, GOOD, count=2)}")
    assert not allows(guide, f"Let me see. {call(written, BAD)}")


@ALL
def test_an_answer_that_is_no_call_is_what_it_has_to_be(written: CallFormat) -> None:
    by_schema = guide_for(
        written, inputs(), Guide(json_schema={"type": "array", "items": {"type": "integer"}})
    )
    any_object = guide_for(written, inputs(), Guide(json_object=True))

    assert allows(by_schema, f"{written.answer}[1, 2]")
    assert allows(by_schema, f"{written.opens if written.is_bare else ''}{call(written, GOOD)}")
    assert not allows(by_schema, "It rains.")
    assert allows(any_object, f'{written.answer}{{"a": {{"b": null}}}}')
    assert not allows(any_object, f"{written.answer}[1]")


def test_without_a_choice_the_guide_is_as_it_was() -> None:
    guide = Guide(regex="a+")

    assert guide_for(HERMES, inputs(tool_choice="none"), guide) is guide
    assert guide_for(HERMES, Inputs(text="x"), guide) is guide


@pytest.mark.parametrize("guide", [Guide(regex="a+"), Guide(choice=["a"]), Guide(grammar="start: /a/")])
def test_other_guides_do_not_go_with_tools(guide: Guide) -> None:
    with pytest.raises(ClientError, match="expected json_schema or json_object together with tools"):
        guide_for(HERMES, inputs(), guide)


def test_the_schemas_of_functions_are_enforced_like_those_of_answers() -> None:
    text = {"type": "object", "properties": {"a": {"type": "string", "pattern": '^[^"]$'}}, "required": ["a"]}
    guide = guide_for(HERMES, inputs({"name": "f", "parameters": text}, tool_choice="required"), None)

    assert allows(guide, call(HERMES, '{"a": "b"}', "f"))
    assert not allows(guide, call(HERMES, '{"a": "\\""}', "f"))
    never_ends = {**text, "properties": {"a": {"$ref": "#"}}}
    with pytest.raises(ClientError, match="tools: the parameters of f: expected a schema with finite values"):
        guide_for(HERMES, inputs({"name": "f", "parameters": never_ends}, tool_choice="required"), None)


def test_schemas_that_are_too_much_together_are_refused() -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    many = [{"name": f"f{n}", "parameters": wide} for n in range(5)]

    with pytest.raises(ClientError, match="tools: their schemas are too large for one answer"):
        guide_for(HERMES, inputs(*many, tool_choice="required"), Guide(json_schema=wide))


@ALL
def test_what_a_grammar_forces_is_read_as_a_call(written: CallFormat) -> None:
    reader = ToolCallParser(written, {"forecast": SCHEMA, "now": {}})
    said = reader.push(call(written, GOOD))

    assert (said.content, reader.end().content) == ("", "")
    [piece] = said.calls.values()
    assert piece.name == "forecast"
    assert json.loads(piece.arguments) == json.loads(GOOD)
