r"""Formats of tool calls in answers, and the grammars that constrain answers to them.

The chat template tells the model how to write calls, so the format is detected in the template's source.

    hermes     <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>        Qwen, Hermes
    mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}]                  Mistral
    llama      {"name": ..., "parameters": {...}}                               Llama 3, and nothing else

and those of `models.text.tagged_calls`:

    qwen3_coder   Qwen3-Coder, Qwen3.5
    glm           GLM-4.5 and later

A worker reports the name of its model's format when it joins; gateways parse calls by it
(`models.text.tool_call_parser`). This module is pure: it needs no template language and no tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from models.text import tagged_calls
from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.prepare import prepared_schema
from models.text.tagged_calls import Tags
from shared.errors import ClientError
from shared.events import Function, Guide, Inputs, NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format of tool calls; each call is a JSON object, unless it has tags.

    Attributes:
        opens: the text before a call.
        closes: the text after a call; after all calls with `is_array`.
        arguments: the key of a call's arguments.
        is_array: the calls of an answer are one JSON array.
        is_bare: an answer that starts with `{` is a call too, if it names an offered function.
        separator: the text between two calls; empty if an answer has at most one.
        has_short_ids: call ids are nine letters and digits, the only ones that Mistral's templates accept.
        tags: each call is a name and arguments between these tags.
    """

    name: str
    opens: str
    closes: str = ""
    arguments: str = "arguments"
    is_array: bool = False
    is_bare: bool = False
    separator: str = ""
    has_short_ids: bool = False
    tags: Tags | None = None

    @property
    def begins(self) -> str:
        """The text before a call that a grammar forces."""
        return self.opens if self.tags is not None and not self.tags.opens_name else f"{self.opens}\n"

    @property
    def ends(self) -> str:
        """The text after it."""
        return self.closes if self.tags is not None and not self.tags.closes_call else f"\n{self.closes}"


HERMES: Final = CallFormat(
    name="hermes", opens="<tool_call>", closes="</tool_call>", separator="\n<tool_call>\n"
)
MISTRAL: Final = CallFormat(
    name="mistral", opens="[TOOL_CALLS]", closes="]", is_array=True, separator=", ", has_short_ids=True
)
LLAMA: Final = CallFormat(
    name="llama", opens="<|python_tag|>", closes=";", arguments="parameters", is_bare=True
)
QWEN3_CODER: Final = CallFormat(
    name="qwen3_coder",
    opens="<tool_call>",
    closes="</tool_call>",
    separator="\n<tool_call>\n",
    tags=tagged_calls.QWEN3_CODER,
)
GLM: Final = CallFormat(
    name="glm",
    opens="<tool_call>",
    closes="</tool_call>",
    separator="\n<tool_call>",
    tags=tagged_calls.GLM,
)
FORMATS: Final[Mapping[str, CallFormat]] = MappingProxyType(
    {known.name: known for known in (HERMES, MISTRAL, LLAMA, QWEN3_CODER, GLM)}
)
_ELSEWHERE: Final = ("[ARGS]",)
"""Marks of templates whose calls are written in a format that is not known."""


def format_in(source: str) -> CallFormat | None:
    """The format in which a template asks its model to write calls; None if it is unknown."""
    if any(mark in source for mark in _ELSEWHERE):
        return None
    if HERMES.opens in source and HERMES.closes in source:
        if tagged_calls.QWEN3_CODER.opens_name in source:
            return QWEN3_CODER
        return GLM if tagged_calls.GLM.opens_key in source else HERMES
    if MISTRAL.opens in source:
        return MISTRAL
    if LLAMA.opens in source or '"parameters": dictionary' in source:
        return LLAMA
    return None


def offered(inputs: Inputs) -> list[dict[str, Any]] | None:
    """The tools of a request, as templates take them; None if the model is to see none."""
    if not inputs.tools or inputs.tool_choice == "none":
        return None
    return [{"type": "function", "function": _described(tool.function)} for tool in inputs.tools]


def _described(function: Function) -> dict[str, Any]:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return described


# ---- grammars -------------------------------------------------------------------------------------

_COMPACT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # no \uXXXX: see `models.text.guides`
}
"""JSON with fixed white space, as models are shown it; this bounds the length of an answer."""
_ANY_OBJECT: Final = {"type": "object"}
_ANYTHING: Final = r"/(.|\n)*/"


def guide_for(found: CallFormat, inputs: Inputs, guide: Guide | None) -> Guide | None:
    """The guide of an answer to a request with tools; None if the answer is free.

    With `tool_choice` `auto`, calls of `strict` functions are constrained to their schema, and the rest of
    the answer is free.

    `guide` is the request's own, for an answer without calls.

    Raises:
        ClientError: the guide cannot be combined with tools.
    """
    functions = [tool.function for tool in inputs.tools]
    choice = inputs.tool_choice
    if choice == "none" or not functions:
        return guide
    content = _content(guide)
    if choice == "auto" and content is None and not any(function.strict for function in functions):
        return None
    many = inputs.parallel_tool_calls and found.separator
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        many = False
    calls = _calls(found, functions, many=bool(many))
    if choice != "auto":
        return _guide({"start": "calls", **calls})
    if content is not None:
        marked = f"{_text(found.opens)} calls" if found.is_bare else "calls"  # differs from content at once
        return _guide({"start": f"content | {marked}", "content": content, **calls})
    return _guide(_free(found, functions, many=bool(many)))


def _content(guide: Guide | None) -> str | None:
    """The grammar rule of an answer without calls."""
    if guide is None:
        return None
    if guide.json_schema is not None:
        return _json(guide.json_schema, "json_schema")
    if guide.json_object:
        return _json(_ANY_OBJECT, "json_object")
    raise ClientError(
        "guide: expected json_schema or json_object together with tools, found another one; leave it out, "
        "or set tool_choice to 'none'",
        code="not_supported",
    )


def _calls(found: CallFormat, functions: Sequence[Function], *, many: bool) -> dict[str, str]:
    """The rules of an answer that consists of calls."""
    rules = _objects(found, functions, all_strict=True)
    more = f"({_text(found.separator)} {{}})*" if many else ""
    if found.is_array:
        begins, ends = _text(f"{found.opens}["), _text(found.closes)
        return {"calls": f"{begins} call {more.format('call')} {ends}", **rules}
    if found.is_bare:
        return {"calls": "call", **rules}
    closed = f"call {_text(found.ends)}"
    return {"calls": f"{_text(found.begins)} {closed} {more.format(closed)}", **rules}


def _free(found: CallFormat, functions: Sequence[Function], *, many: bool) -> dict[str, str]:
    """The rules of a free answer in which calls are valid."""
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
    """The rule `call`: a JSON object with the call of one of the functions."""
    rules = {"call": " | ".join(f"call_{number}" for number in range(len(functions)))}
    for number, function in enumerate(functions):
        if found.tags is not None:
            rules |= _tagged(found.tags, number, function, is_strict=all_strict or bool(function.strict))
            continue
        begins = f'{{"name": {json.dumps(function.name)}, "{found.arguments}": '
        rules[f"call_{number}"] = f"{_text(begins)} arguments_{number} {_text('}')}"
        schema = _schema(function) if all_strict or function.strict else _ANY_OBJECT
        rules[f"arguments_{number}"] = _json(schema, f"tools: the parameters of {function.name}")
    return rules


def _tagged(tags: Tags, number: int, function: Function, *, is_strict: bool) -> dict[str, str]:
    """The rules of a call with tags."""
    if not is_strict:
        return tagged_calls.any_call_rules(tags, number, function.name)
    what = f"tools: the parameters of {function.name}"

    def json_rule(schema: dict[str, Any]) -> str:
        return _json(schema, what)

    try:
        return tagged_calls.call_rules(tags, number, function.name, _schema(function), json_rule)
    except UnsupportedSchemaError as error:
        raise ClientError(f"{what}: {error}", code="invalid_guide") from error


def _schema(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _json(schema: dict[str, Any] | bool, what: str) -> str:
    """The rule for JSON that matches a schema, which is called `what` in an error."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        known = prepared_schema(schema)
    except UnsupportedSchemaError as error:
        raise ClientError(f"{what}: {error}", code="invalid_guide") from error
    return f"%json {json.dumps({**known, 'x-guidance': _COMPACT})}"


def _text(text: str) -> str:
    """A text as a literal of the grammar."""
    return json.dumps(text)


def _guide(rules: Mapping[str, str]) -> Guide:
    try:
        return Guide(grammar="\n".join(f"{name}: {rule}" for name, rule in rules.items()))
    except ValueError as error:
        raise ClientError(f"tools: their schemas are too large for one answer: {error}") from error
