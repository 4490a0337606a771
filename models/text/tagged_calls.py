r"""Tool calls whose arguments stand between tags, each by itself and without quotes. Pure.

    qwen3_coder   <tool_call>\n<function=f>\n<parameter=a>\nUlm\n</parameter>\n</function>\n</tool_call>
    glm           <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>
    minimax       <minimax:tool_call>\n<invoke name="f">\n<parameter name="a">Ulm</parameter>\n</invoke>\n
                  </minimax:tool_call>
    deepseek_v3_2 <｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n
                  <｜DSML｜parameter name="a" string="true">Ulm</｜DSML｜parameter>\n</｜DSML｜invoke>\n
                  </｜DSML｜function_calls>

A value says nothing of its type, but for DeepSeek's: that is in the function's schema. A string is the text
as it is, and everything else is JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from models.text.json_schema.errors import UnsupportedSchemaError

_FREE_KEYWORDS: Final = frozenset({"type", "enum", "const", "description", "title", "default", "examples"})
"""The keywords of a string's schema that a text without quotes can follow."""

_PYTHON: Final[Mapping[str, str]] = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of one format.

    Attributes:
        opens_name, closes_name: around the function's name; without them it ends with its line.
        opens_key, closes_key: around an argument's name.
        opens_value, closes_value: around its value.
        closes_call: behind the last argument; empty if nothing is.
        has_lines: a value stands on lines of its own.
        behind_key: the text between an argument's name and its value.
        kinds: the texts behind the name of a string, and of anything else, where the format tells them apart.
    """

    opens_name: str = ""
    closes_name: str = ""
    opens_key: str
    closes_key: str
    opens_value: str = ""
    closes_value: str
    closes_call: str = ""
    has_lines: bool = False
    behind_key: str = "\n"
    kinds: tuple[str, str] = ("", "")


QWEN3_CODER: Final = Tags(
    opens_name="<function=",
    closes_name=">",
    opens_key="<parameter=",
    closes_key=">",
    closes_value="</parameter>",
    closes_call="</function>",
    has_lines=True,
)
GLM: Final = Tags(
    opens_key="<arg_key>", closes_key="</arg_key>", opens_value="<arg_value>", closes_value="</arg_value>"
)
MINIMAX: Final = Tags(
    opens_name='<invoke name="',
    closes_name='">',
    opens_key='<parameter name="',
    closes_key='">',
    closes_value="</parameter>",
    closes_call="</invoke>",
    behind_key="",
)
DSML: Final = Tags(
    opens_name='<｜DSML｜invoke name="',
    closes_name='">',
    opens_key='<｜DSML｜parameter name="',
    closes_key='"',
    closes_value="</｜DSML｜parameter>",
    closes_call="</｜DSML｜invoke>",
    behind_key="",
    kinds=(' string="true">', ' string="false">'),
)


# ---- values ------------------------------------------------------------------------------------------------


def is_text(schema: object) -> bool:
    """True for the schema of a value that is a string as it stands; one without a schema is."""
    if not isinstance(schema, Mapping) or not schema:
        return True
    if "type" in schema:
        return bool(schema["type"] == "string")
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return all(isinstance(value, str) for value in values)


def value_of(text: str) -> str:
    """The JSON of a value that is no string by its schema: what is no JSON is a string.

    Templates write Python's names of truth values and of nothing, so models do at times.
    """
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


# ---- grammars ----------------------------------------------------------------------------------------------


def call_rules(
    tags: Tags, number: int, name: str, schema: Mapping[str, Any], json_rule: Any
) -> dict[str, str]:
    """The rules of a call of the function `name`, from its name to its last argument: `call_<number>`.

    `json_rule(schema)` is the rule of JSON that matches a schema.

    Raises:
        UnsupportedSchemaError: a string has a rule that a text without quotes cannot follow.
    """
    rules: dict[str, str] = {}
    required = set(schema.get("required", ()))
    parts = []
    for place, (key, found) in enumerate(schema.get("properties", {}).items()):
        rule = f"argument_{number}_{place}"
        rules |= _argument_rules(tags, rule, key, _with_definitions(found, schema), json_rule)
        parts.append(rule if key in required else f"{rule}?")
    begins = _text(tags.opens_name + name + tags.closes_name + "\n")
    ends = _text(tags.closes_call) if tags.closes_call else ""
    rules[f"call_{number}"] = " ".join(part for part in (begins, *parts, ends) if part)
    return rules


def any_call_rules(tags: Tags, number: int, name: str) -> dict[str, str]:
    """The rules of a call of the function `name` with any arguments."""
    begins = _text(tags.opens_name + name + tags.closes_name + "\n")
    kinds = " | ".join(
        sorted({_text(tags.closes_key + kind + tags.behind_key + tags.opens_value) for kind in tags.kinds})
    )
    key = f'{_text(tags.opens_key)} /[^<>"\\n]+/ ({kinds})'
    value = f"any_value_{number}[suffix={_text(tags.closes_value)}]"
    ends = _text(tags.closes_call) if tags.closes_call else ""
    return {
        f"call_{number}": f'{begins} ({key} any_value_{number} "\\n")* {ends}',
        value: r"/(.|\n)*/",
    }


def _argument_rules(
    tags: Tags, rule: str, key: str, schema: Mapping[str, Any], json_rule: Any
) -> dict[str, str]:
    kind = tags.kinds[0 if is_text(schema) else 1]
    begins = _text(tags.opens_key + key + tags.closes_key + kind + tags.behind_key + tags.opens_value)
    line = "\n" if tags.has_lines else ""
    ends = f"{line}{tags.closes_value}\n"
    if not is_text(schema):
        return {rule: f"{begins} {rule}_value {_text(ends)}", f"{rule}_value": json_rule(schema)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = " | ".join(_text(str(value)) for value in values)
        return {rule: f"{begins} ({texts}) {_text(ends)}"}
    if unknown := sorted(schema.keys() - _FREE_KEYWORDS - {"$defs", "definitions"}):
        raise UnsupportedSchemaError(
            f"{key}: this model writes strings without quotes, so {', '.join(unknown)} cannot be enforced"
        )
    return {rule: f"{begins} {rule}_value", f"{rule}_value[suffix={_text(ends)}]": r"/(.|\n)*/"}


def _with_definitions(found: Any, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """A property's schema with the definitions that it may refer to."""
    if not isinstance(found, Mapping):
        return {} if found else {"not": {}}
    if is_text(found):
        return found
    return {**{name: whole[name] for name in ("$defs", "definitions") if name in whole}, **found}


def _text(text: str) -> str:
    return json.dumps(text)


# ---- texts -------------------------------------------------------------------------------------------------


def held_back(text: str, ends: Sequence[str]) -> int:
    """The number of last characters of a text that may begin one of `ends`."""
    most = min(len(text), max(map(len, ends)) - 1)
    return next((n for n in range(most, 0, -1) if any(end.startswith(text[-n:]) for end in ends)), 0)
