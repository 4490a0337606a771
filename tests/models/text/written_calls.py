"""Calls as models write them, in each format."""

import json
from typing import Any

from models.text import tagged_calls
from models.text.tool_calls import GLM, CallFormat

_QUOTE = '<|"|>'


def written_calls(written: CallFormat, arguments: dict[str, Any], name: str, count: int = 1) -> str:
    """A text with `count` calls of one function."""
    if written.tags is not None:
        several = "\n".join([_tagged(written, arguments, name)] * count)
        return f"{written.opens}\n{several}\n{written.closes}" if written.is_section else several
    as_json = json.dumps(arguments, ensure_ascii=False)
    one = f'{{"name": "{name}", "{written.arguments}": {as_json}}}'
    match written.name:
        case "hermes":
            return "\n".join([f"<tool_call>\n{one}\n</tool_call>"] * count)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join([one] * count)}]"
        case "llama":
            return "; ".join([one] * count)
        case "deepseek":
            one = (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
                f"```json\n{as_json}\n```<｜tool▁call▁end｜>"
            )
            return "<｜tool▁calls▁begin｜>" + "\n".join([one] * count) + "<｜tool▁calls▁end｜>"
        case "deepseek_v3_1":
            one = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json}<｜tool▁call▁end｜>"
            return "<｜tool▁calls▁begin｜>" + one * count + "<｜tool▁calls▁end｜>"
        case "mistral_args":
            return f"[TOOL_CALLS]{name}[ARGS]{as_json}" * count
        case "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json}" * count
        case "gemma":
            return f"<|tool_call>call:{name}{_gemma(arguments, _QUOTE)}<tool_call|>" * count
        case "functiongemma":
            call = f"call:{name}{_gemma(arguments, '<escape>')}"
            return f"<start_function_call>{call}<end_function_call>" * count
        case _:
            raise AssertionError(f"no call is written for {written.name}")


def _tagged(written: CallFormat, arguments: dict[str, Any], name: str) -> str:
    texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
    if written is GLM:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"
    if written.is_section:
        mark = "｜DSML｜" if written.tags is tagged_calls.DSML else ""
        kinds = {
            key: f' string="{str(isinstance(arguments[key], str)).lower()}"' if mark else "" for key in texts
        }
        pairs = "".join(
            f'<{mark}parameter name="{key}"{kinds[key]}>{text}</{mark}parameter>\n'
            for key, text in texts.items()
        )
        return f'<{mark}invoke name="{name}">\n{pairs}</{mark}invoke>'
    pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _gemma(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(value[key], quote)}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(_gemma(one, quote) for one in value) + "]"
        case _:
            return json.dumps(value)
