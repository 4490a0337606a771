r"""Formats of tool calls in answers, and the grammars that constrain answers to them.

The chat template tells the model how to write calls, so the format is detected in the template's source.

    hermes     <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>        Qwen, Hermes
    mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}]                  Mistral
    llama      {"name": ..., "parameters": {...}}                               Llama 3, and nothing else

those of `models.text.tagged_calls`, whose arguments stand between tags:

    qwen3_coder   Qwen3-Coder, Qwen3.5
    glm           GLM-4.5 and later
    minimax       MiniMax-M2
    deepseek_v3_2, deepseek_v4

and those of `models.text.named_calls`, whose function is named in front of its arguments:

    deepseek, deepseek_v3_1, mistral_args, harmony (gpt-oss), gemma, functiongemma

A worker reports the name of its model's format when it joins; gateways parse calls by it
(`models.text.tool_call_parser`). This module is pure: it needs no template language and no tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from models.text import gemma_arguments, named_calls, tagged_calls
from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.prepare import prepared_schema
from models.text.named_calls import Named
from models.text.tagged_calls import Tags
from shared.errors import ClientError
from shared.events import Function, Guide, Inputs, NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format of tool calls; each call is a JSON object, unless it has tags or is named.

    Attributes:
        opens: the text before a call; before all calls with `is_array` or `is_section`.
        closes: the text after them.
        arguments: the key of a call's arguments.
        is_array: the calls of an answer are one JSON array.
        is_section: all calls of an answer stand between `opens` and `closes`.
        is_bare: an answer that starts with `{` is a call too, if it names an offered function.
        separator: the text between two calls; None if an answer has at most one.
        has_short_ids: call ids are nine letters and digits, the only ones that Mistral's templates accept.
        tags: each call is a name and arguments between these tags.
        named: each call is a name, and then its arguments.
        tokens: what else may be a special token, and has to be in the text.
        answer: the text before an answer without calls, where it has one.
    """

    name: str
    opens: str
    closes: str = ""
    arguments: str = "arguments"
    is_array: bool = False
    is_section: bool = False
    is_bare: bool = False
    separator: str | None = None
    has_short_ids: bool = False
    tags: Tags | None = None
    named: Named | None = None
    tokens: tuple[str, ...] = ()
    answer: str = ""

    @property
    def begins(self) -> str:
        """The text before a call that a grammar forces."""
        if self.named is not None or (self.tags is not None and not self.tags.opens_name):
            return self.opens
        return f"{self.opens}\n"

    @property
    def ends(self) -> str:
        """The text after it."""
        if self.named is not None or (self.tags is not None and not self.tags.closes_call):
            return self.closes
        return f"\n{self.closes}"

    @property
    def visible(self) -> tuple[str, ...]:
        """The tokens that have to be in the text."""
        return (self.opens, *self.tokens)


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
_DEEPSEEK_TOKENS: Final = (
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
DEEPSEEK: Final = CallFormat(
    name="deepseek",
    opens="<｜tool▁calls▁begin｜>",
    closes="<｜tool▁calls▁end｜>",
    is_section=True,
    separator="\n",
    named=named_calls.DEEPSEEK,
    tokens=_DEEPSEEK_TOKENS,
)
DEEPSEEK_V3_1: Final = CallFormat(
    name="deepseek_v3_1",
    opens="<｜tool▁calls▁begin｜>",
    closes="<｜tool▁calls▁end｜>",
    is_section=True,
    separator="",
    named=named_calls.DEEPSEEK_V3_1,
    tokens=_DEEPSEEK_TOKENS,
)
MISTRAL_ARGS: Final = CallFormat(
    name="mistral_args",
    opens="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    has_short_ids=True,
    named=named_calls.MISTRAL_ARGS,
    tokens=("[CALL_ID]", "[ARGS]"),
)
HARMONY: Final = CallFormat(
    name="harmony",
    opens="<|channel|>commentary to=functions.",
    named=named_calls.HARMONY,
    tokens=("<|channel|>", "<|constrain|>", "<|message|>"),
    answer="<|channel|>final<|message|>",
)
GEMMA: Final = CallFormat(
    name="gemma",
    opens="<|tool_call>",
    closes="<tool_call|>",
    separator="<|tool_call>",
    named=named_calls.GEMMA,
    tokens=("<tool_call|>", '<|"|>'),
)
FUNCTION_GEMMA: Final = CallFormat(
    name="functiongemma",
    opens="<start_function_call>",
    closes="<end_function_call>",
    separator="<start_function_call>",
    named=named_calls.FUNCTION_GEMMA,
    tokens=("<end_function_call>", "<escape>"),
)
MINIMAX: Final = CallFormat(
    name="minimax",
    opens="<minimax:tool_call>",
    closes="</minimax:tool_call>",
    is_section=True,
    separator="\n",
    tags=tagged_calls.MINIMAX,
    tokens=("</minimax:tool_call>",),
)
DEEPSEEK_V3_2: Final = CallFormat(
    name="deepseek_v3_2",
    opens="<｜DSML｜function_calls>",
    closes="</｜DSML｜function_calls>",
    is_section=True,
    separator="\n",
    tags=tagged_calls.DSML,
    tokens=("｜DSML｜",),
)
DEEPSEEK_V4: Final = replace(
    DEEPSEEK_V3_2, name="deepseek_v4", opens="<｜DSML｜tool_calls>", closes="</｜DSML｜tool_calls>"
)
_ALL: Final = (
    HERMES, MISTRAL, LLAMA, QWEN3_CODER, GLM, MINIMAX,
    DEEPSEEK, DEEPSEEK_V3_1, DEEPSEEK_V3_2, DEEPSEEK_V4, MISTRAL_ARGS, HARMONY, GEMMA, FUNCTION_GEMMA,
)  # fmt: skip
FORMATS: Final[Mapping[str, CallFormat]] = MappingProxyType({known.name: known for known in _ALL})
_SIGNS: Final[tuple[tuple[CallFormat, tuple[str, ...]], ...]] = (
    (HARMONY, ("<|start|>", "functions.", "<|channel|>commentary")),
    (GEMMA, (GEMMA.opens, GEMMA.closes)),
    (FUNCTION_GEMMA, (FUNCTION_GEMMA.opens, FUNCTION_GEMMA.closes)),
    (DEEPSEEK, (DEEPSEEK.opens, "```json")),
    (DEEPSEEK_V3_1, (DEEPSEEK_V3_1.opens, "<｜tool▁sep｜>")),
    (DEEPSEEK_V4, ("｜DSML｜", "tool_calls>")),
    (DEEPSEEK_V3_2, ("｜DSML｜", "function_calls>")),
    (MINIMAX, (MINIMAX.opens, MINIMAX.closes)),
    (QWEN3_CODER, (HERMES.opens, HERMES.closes, tagged_calls.QWEN3_CODER.opens_name)),
    (GLM, (HERMES.opens, HERMES.closes, tagged_calls.GLM.opens_key)),
    (HERMES, (HERMES.opens, HERMES.closes)),
    (MISTRAL_ARGS, (MISTRAL.opens, "[ARGS]")),
    (MISTRAL, (MISTRAL.opens,)),
    (LLAMA, (LLAMA.opens,)),
    (LLAMA, ('"parameters": dictionary',)),
)
"""What a template contains that asks for calls in a format; the first that fits is it."""
_ELSEWHERE: Final = ("]<]minimax[>[",)
"""Marks of templates whose calls are written in a format that is not known (MiniMax-M3)."""


def format_in(source: str) -> CallFormat | None:
    """The format in which a template asks its model to write calls; None if it is unknown."""
    if any(mark in source for mark in _ELSEWHERE):
        return None
    return next((known for known, signs in _SIGNS if all(sign in source for sign in signs)), None)


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
    many = inputs.parallel_tool_calls and found.separator is not None
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        many = False
    calls = _calls(found, functions, many=many)
    if choice != "auto":
        return _guide({"start": "calls", **calls})
    if content is not None:
        marked = f"{_text(found.opens)} calls" if found.is_bare else "calls"  # differs from content at once
        answer = f"{_text(found.answer)} content" if found.answer else "content"
        return _guide({"start": f"{answer} | {marked}", "content": content, **calls})
    return _guide(_free(found, functions, many=many))


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
    more = _more(found) if many else ""
    if found.is_section and found.tags is not None:
        one = 'call "\\n"'  # the line's end before `closes` must not be taken for that of a call
        more = f"({one})*" if many else ""
        return {"calls": f"{_text(found.begins)} {one} {more} {_text(found.closes)}", **rules}
    if found.is_array or found.is_section:
        begins = f"{found.opens}[" if found.is_array else found.opens
        return {"calls": f"{_text(begins)} call {more.format('call')} {_text(found.closes)}", **rules}
    if found.is_bare:
        return {"calls": "call", **rules}
    closed = _closed(found)
    return {"calls": f"{_text(found.begins)} {closed} {more.format(closed)}", **rules}


def _more(found: CallFormat) -> str:
    """Further calls, `{}` each."""
    return f"({_text(found.separator)} {{}})*" if found.separator else "({})*"


def _closed(found: CallFormat) -> str:
    """A call and what stands behind it."""
    return f"call {_text(found.ends)}" if found.ends else "call"


def _free(found: CallFormat, functions: Sequence[Function], *, many: bool) -> dict[str, str]:
    """The rules of a free answer in which calls are valid."""
    rules = _objects(found, functions, all_strict=False)
    if found.is_bare:
        return {"start": f"call | {_text(found.opens)} call | free", "free": r"/([^{](.|\n)*)?/", **rules}
    lead = f"lead[suffix={_text(found.opens)}]"
    if found.is_array or found.is_section:
        more = "" if not many else "(/,\\s?/ call)*" if found.is_array else "(/\\s?/ call)*"
        opens = '"["' if found.is_array else ""
        behind = f"/\\s?/ {opens} call {more} /\\s?/ {_text(found.closes)}"
        return {"start": "free | lead behind", lead: _ANYTHING, "behind": behind, "free": _ANYTHING, **rules}
    behind = f"/\\s?/ call /\\s?/ {_text(found.closes)}" if found.closes else "/\\s?/ call"
    start = "(lead behind)* free" if many else "free | lead behind /\\s*/"
    return {"start": start, lead: _ANYTHING, "behind": behind, "free": _ANYTHING, **rules}


def _objects(found: CallFormat, functions: Sequence[Function], *, all_strict: bool) -> dict[str, str]:
    """The rule `call`: a call of one of the functions."""
    rules = {"call": " | ".join(f"call_{number}" for number in range(len(functions)))}
    for number, function in enumerate(functions):
        is_strict = all_strict or bool(function.strict)
        if found.tags is not None:
            rules |= _tagged(found.tags, number, function, is_strict=is_strict)
            continue
        begins, ends = f'{{"name": {json.dumps(function.name)}, "{found.arguments}": ', "}"
        if found.named is not None:
            begins = found.named.opens_name + function.name + found.named.closes_name
            ends = found.named.closes_arguments
        behind = f" {_text(ends)}" if ends else ""
        if found.named is not None and found.named.quote:
            rules[f"call_{number}"] = f"{_text(begins)} arguments_{number}_object{behind}"
            rules |= _quoted_arguments(found.named.quote, number, function, is_strict=is_strict)
            continue
        rules[f"call_{number}"] = f"{_text(begins)} arguments_{number}{behind}"
        schema = _schema(function) if is_strict else _ANY_OBJECT
        rules[f"arguments_{number}"] = _json(schema, f"tools: the parameters of {function.name}")
    return rules


def _quoted_arguments(quote: str, number: int, function: Function, *, is_strict: bool) -> dict[str, str]:
    """The rules of arguments in Gemma's syntax."""
    if not is_strict:
        return gemma_arguments.any_arguments(quote, f"arguments_{number}_")
    what = f"tools: the parameters of {function.name}"
    schema = _schema(function)
    try:
        prepared_schema(schema)  # refuses what no finite text satisfies
        return gemma_arguments.arguments_rules(
            quote, f"arguments_{number}_", schema, lambda part: _json(dict(part), what)
        )
    except UnsupportedSchemaError as error:
        raise ClientError(f"{what}: {error}", code="invalid_guide") from error


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
