"""Published chat templates: a call that a template writes is read as that call. `make soak` fetches them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from models.text.chat_prompts import ChatPrompts
from models.text.chat_template import ChatTemplate, ChatTemplateError
from models.text.reasoning_parser import parser_for
from models.text.tool_call_parser import ToolCallParser

FORMATS = {
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "GLM-4.6": ("glm", "think"),
    "GLM-4.7-Flash": ("glm", "think"),
    "MiniMax-M2": ("minimax", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_args", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v3_2", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "think"),
    "google-gemma-4-31B-it": ("gemma", "gemma"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_args", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "tool_chat_template_deepseekr1": ("deepseek", "think"),
    "tool_chat_template_deepseekv3": ("deepseek", None),
    "tool_chat_template_deepseekv31": ("deepseek_v3_1", "think"),
    "tool_chat_template_functiongemma": ("functiongemma", None),
    "tool_chat_template_gemma4": ("gemma", "gemma"),
    "tool_chat_template_hermes": ("hermes", None),
    "tool_chat_template_llama3.2_json": ("llama", None),
    "tool_chat_template_mistral_parallel": ("mistral", None),
    "tool_chat_template_qwen3coder": ("qwen3_coder", None),
}
"""The formats of calls and of reasoning of published models, by the name of the template's file."""
WITHOUT_TOOLS = (
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
)
ARGUMENTS = {"city": 'Ulm "on" the Danube', "days": 3, "near": {"by": ["car", "bus"], "km": 2.5}, "wet": True}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "How it will be.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "description": "For how long."},
                    "near": {"type": "object", "description": "How near."},
                    "wet": {"type": "boolean", "description": "If it may rain."},
                },
                "required": ["city"],
            },
        },
    }
]
ASKED = [{"role": "user", "content": "Will it rain?"}]
FLAT = {name: value for name, value in ARGUMENTS.items() if name != "near"}
_FLAT = ("tool_chat_template_functiongemma",)  # writes an object as Python does
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "today": "2026-01-01"}


@pytest.fixture(scope="module")
def folder() -> Path:
    if "CHAT_TEMPLATES" not in os.environ:
        pytest.skip("`make soak` fetches the chat templates of published models")
    return Path(os.environ["CHAT_TEMPLATES"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_a_template_writes_is_read_as_that_call(folder: Path, name: str) -> None:
    template = ChatTemplate((folder / f"{name}.jinja").read_text(), _SPECIAL, origin=name)
    prompts = ChatPrompts(template, template)
    calls, reasoning = FORMATS[name]

    assert prompts.calls is not None
    assert prompts.calls.name == calls
    assert (None if prompts.reasoning is None else prompts.reasoning.name) == reasoning
    whole = _rendered(template, ARGUMENTS if name not in _FLAT else FLAT)
    asked = [template.render(ASKED, TOOLS, add_generation_prompt=found) for found in (True, False)]
    text = whole[max(len(one) if whole.startswith(one) else 0 for one in asked) :]
    if prompts.reasoning is not None:
        parser = parser_for(prompts.reasoning, is_inside=False)
        text = parser.push(text).content + parser.end().content
    reader = ToolCallParser(prompts.calls, {"forecast": TOOLS[0]["function"]["parameters"]})
    said = [reader.push(character) for character in text]
    said.append(reader.end())

    assert reader.count == 1, text
    assert next(piece.calls[0].name for piece in said if piece.calls) == "forecast"
    arguments = "".join(piece.calls[0].arguments for piece in said if piece.calls)
    assert json.loads(arguments) == (ARGUMENTS if name not in _FLAT else FLAT)


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_without_tools_has_no_format_of_calls(folder: Path, name: str) -> None:
    template = ChatTemplate((folder / f"{name}.jinja").read_text(), _SPECIAL, origin=name)

    assert ChatPrompts(template, template).calls is None


def _rendered(template: ChatTemplate, arguments: dict[str, Any]) -> str:
    """A chat that ends with a call; some templates want a text with it, and some want none."""
    function = {"name": "forecast", "arguments": arguments}
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}],
    }
    try:
        return template.render([*ASKED, {**called, "content": ""}], TOOLS, add_generation_prompt=False)
    except ChatTemplateError:
        return template.render([*ASKED, called], TOOLS, add_generation_prompt=False)
