r"""How models write calls of tools, and the grammars that have them write some.

A chat template tells the model how: so from its source it is known which of these formats its answers have.

    hermes     <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>        Qwen, Hermes
    mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}]                  Mistral
    llama      {"name": ..., "parameters": {...}}                               Llama 3, and nothing else

A worker says the name of its model's format as it joins; gateways read calls in answers by it
(`models.text.tool_call_parser`). This module is pure, and knows no template language and no tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from shared.errors import ClientError
from shared.events import Function, Guide, Inputs, NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way to write calls; each is a JSON object.

    Attributes:
        opens: the text before a call.
        closes: the text behind it; behind all of them where `is_array`.
        arguments: the key of a call's arguments.
        is_array: the calls of an answer are one JSON array.
        is_bare: an answer that begins with `{` is a call as well, if it names a known function.
        separator: the text between two calls; empty where an answer has but one.
        has_short_ids: calls have ids of nine letters and digits; Mistral's templates take no others.
    """

    name: str
    opens: str
    closes: str = ""
    arguments: str = "arguments"
    is_array: bool = False
    is_bare: bool = False
    separator: str = ""
    has_short_ids: bool = False


HERMES: Final = CallFormat(
    name="hermes", opens="<tool_call>", closes="</tool_call>", separator="\n<tool_call>\n"
)
MISTRAL: Final = CallFormat(
    name="mistral", opens="[TOOL_CALLS]", closes="]", is_array=True, separator=", ", has_short_ids=True
)
LLAMA: Final = CallFormat(
    name="llama", opens="<|python_tag|>", closes=";", arguments="parameters", is_bare=True
)
FORMATS: Final[Mapping[str, CallFormat]] = MappingProxyType(
    {known.name: known for known in (HERMES, MISTRAL, LLAMA)}
)
_ELSEWHERE: Final = ("<function=", "<arg_key>", "[ARGS]")
"""What is in templates whose calls are no JSON objects, whatever else is in them."""


def format_in(source: str) -> CallFormat | None:
    """The format that a template which knows tools asks its model for; None is one that is not known here."""
    if any(mark in source for mark in _ELSEWHERE):
        return None
    if HERMES.opens in source and HERMES.closes in source:
        return HERMES
    if MISTRAL.opens in source:
        return MISTRAL
    if LLAMA.opens in source or '"parameters": dictionary' in source:
        return LLAMA
    return None


def offered(inputs: Inputs) -> list[dict[str, Any]] | None:
    """The tools as a template takes them; None where the model is not to know of any."""
    if not inputs.tools or inputs.tool_choice == "none":
        return None
    return [{"type": "function", "function": _described(tool.function)} for tool in inputs.tools]


def _described(function: Function) -> dict[str, Any]:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return described


# ---- what has to be written -----------------------------------------------------------------------

_COMPACT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # no \uXXXX: see `models.text.guides`
}
"""How models write JSON that they were shown; and an end is in sight, also of one that likes spaces."""
_ANY_OBJECT: Final = {"type": "object"}
_ANYTHING: Final = r"/(.|\n)*/"


def guide_for(found: CallFormat, inputs: Inputs, guide: Guide | None) -> Guide | None:
    """What an answer has to be, with the tools of `inputs`; `guide`: what one has to be that is no call.

    None is whatever the model says. Where the model chooses (`auto`), calls of `strict` functions are valid
    by their schema, and all else of the answer is free.

    Raises:
        ClientError: tools do not go with such a guide.
    """
    functions = [tool.function for tool in inputs.tools]
    choice = inputs.tool_choice
    if choice == "none" or not functions:
        return guide
    content = _content(guide)
    many = inputs.parallel_tool_calls and found.separator
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        many = False
    calls = _calls(found, functions, many=bool(many))
    if choice != "auto":
        return _guide({"start": "calls", **calls})
    if content is not None:
        marked = f"{_text(found.opens)} calls" if found.is_bare else "calls"  # told from an object at once
        return _guide({"start": f"content | {marked}", "content": content, **calls})
    if any(function.strict for function in functions):
        return _guide(_free(found, functions, many=bool(many)))
    return None


def _content(guide: Guide | None) -> str | None:
    """The rule of an answer that is no call."""
    if guide is None:
        return None
    if guide.json_schema is not None:
        return _json(guide.json_schema)
    if guide.json_object:
        return _json(_ANY_OBJECT)
    raise ClientError(
        "guide: expected json_schema or json_object beside tools, found another one; leave it out, or ask "
        "with the tool_choice 'none'",
        code="not_supported",
    )


def _calls(found: CallFormat, functions: Sequence[Function], *, many: bool) -> dict[str, str]:
    """The rules of an answer that is calls and nothing else."""
    rules = _objects(found, functions, all_strict=True)
    more = f"({_text(found.separator)} {{}})*" if many else ""
    if found.is_array:
        begins, ends = _text(f"{found.opens}["), _text(found.closes)
        return {"calls": f"{begins} call {more.format('call')} {ends}", **rules}
    if found.is_bare:
        return {"calls": "call", **rules}
    closed = f"call {_text(chr(10) + found.closes)}"
    return {"calls": f"{_text(found.opens + chr(10))} {closed} {more.format(closed)}", **rules}


def _free(found: CallFormat, functions: Sequence[Function], *, many: bool) -> dict[str, str]:
    """The rules of an answer in which calls, where there are some, are valid."""
    rules = _objects(found, functions, all_strict=False)
    if found.is_bare:
        return {"start": f"call | {_text(found.opens)} call | free", "free": r"/([^{](.|\n)*)?/", **rules}
    lead = f"lead[suffix={_text(found.opens)}]"
    if found.is_array:
        more = "(/,\\s?/ call)*" if many else ""
        behind = f'/\\s?/ "[" call {more} {_text(found.closes)}'
        return {"start": "free | lead behind", lead: _ANYTHING, "behind": behind, "free": _ANYTHING, **rules}
    behind = f"/\\s?/ call /\\s?/ {_text(found.closes)}"
    start = "(lead behind)* free" if many else "free | lead behind /\\s*/"
    return {"start": start, lead: _ANYTHING, "behind": behind, "free": _ANYTHING, **rules}


def _objects(found: CallFormat, functions: Sequence[Function], *, all_strict: bool) -> dict[str, str]:
    """The rule `call`: a JSON object that calls one of the functions."""
    rules = {"call": " | ".join(f"call_{number}" for number in range(len(functions)))}
    for number, function in enumerate(functions):
        begins = f'{{"name": {json.dumps(function.name)}, "{found.arguments}": '
        rules[f"call_{number}"] = f"{_text(begins)} arguments_{number} {_text('}')}"
        schema = _schema(function) if all_strict or function.strict else _ANY_OBJECT
        rules[f"arguments_{number}"] = _json(schema)
    return rules


def _schema(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _json(schema: dict[str, Any] | bool) -> str:
    said = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    return f"%json {json.dumps({**said, 'x-guidance': _COMPACT})}"


def _text(text: str) -> str:
    """A text as a grammar has it."""
    return json.dumps(text)


def _guide(rules: Mapping[str, str]) -> Guide:
    try:
        return Guide(grammar="\n".join(f"{name}: {rule}" for name, rule in rules.items()))
    except ValueError as error:
        raise ClientError(f"tools: their schemas are too much for one answer: {error}") from error
