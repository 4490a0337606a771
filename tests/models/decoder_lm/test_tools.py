"""Chats with tools: prompts against transformers' own, guides, and refused requests."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from configs.demo.encoding import CHAT_TEMPLATE
from models.base import CpuResult
from models.decoder_lm import processing
from models.decoder_lm.graph import plan
from models.decoder_lm.processing import DecoderLmProcessing
from shared.errors import ClientError
from shared.events import Inputs, Limits, Params, WalkResult
from shared.plans import PlanRequest, StepResult
from shared.tensors import read_ids
from tests.models import written_checkpoints
from workers.guides.guide_queue import GuideQueue

LIST_TEMPLATE = (
    "{{ bos_token }}{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
OWN = "{{ tools | length if tools else 'no' }} tools <tool_call></tool_call>{{ messages[0].content }}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside, in °C.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain in 你好?"}]


def made(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "callid001", "type": "function", "function": function}],
    }


def folder_of(path: Path, template: Any) -> Path:
    tokenizer = written_checkpoints.byte_level()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    return written_checkpoints.save(path, tokenizer, {**config, "chat_template": template})


def load(path: Path, template: Any) -> DecoderLmProcessing:
    return processing.load(folder_of(path, template), max_seq_len=4096)


def prepare(loaded: DecoderLmProcessing, inputs: dict[str, Any], params: Params | None = None) -> CpuResult:
    args = {"inputs": msgspec.convert(inputs, Inputs), "params": params or Params()}
    return loaded.run("prepare", "k", {}, msgspec.msgpack.decode(msgspec.msgpack.encode(args)))


def test_a_call_without_a_text_reaches_a_template_that_reads_the_text(tmp_path: Path) -> None:
    reads = CHAT_TEMPLATE.replace(
        "{% for", "{% for m in messages if 'x' in m.content %}{% endfor %}{% for", 1
    )
    loaded = load(tmp_path, reads)
    messages = [*ASKED, made({"city": "Ulm"}), {"role": "tool", "tool_call_id": "callid001", "content": "no"}]

    facts = prepare(loaded, {"messages": messages}).facts

    plain = prepare(load(tmp_path, CHAT_TEMPLATE), {"messages": messages}).facts
    assert facts["prompt_tokens"] == plain["prompt_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LIST_TEMPLATE], ids=["hermes", "mistral"])
def test_a_chat_with_tools_is_rendered_as_by_transformers(tmp_path: Path, template: str) -> None:
    folder = folder_of(tmp_path, template)
    messages = [
        *ASKED,
        made({"city": "你好"}),
        {"role": "tool", "tool_call_id": "callid001", "content": "no"},
    ]
    oracle = AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )

    as_clients_write_it = [*ASKED, made('{"city": "你好"}'), messages[-1]]
    result = prepare(
        processing.load(folder, max_seq_len=4096), {"messages": as_clients_write_it, "tools": TOOLS}
    )

    assert read_ids(result.handle("token_ids")) == expected


def test_a_separate_template_for_tools_is_used_only_with_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": OWN},
    ]
    loaded = load(tmp_path, named)
    encode = written_checkpoints.byte_level().encode

    def said(**change: Any) -> list[int]:
        return read_ids(prepare(loaded, {"text": "hi", **change}).handle("token_ids"))

    assert loaded.tool_calls == "hermes"
    assert said(tools=TOOLS) == encode("2 tools <tool_call></tool_call>hi").ids
    assert said(tools=TOOLS, tool_choice="none") == said() == encode("hi").ids


def test_the_template_for_tools_may_be_a_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(OWN, encoding="utf-8")

    assert processing.load(folder, max_seq_len=512).tool_calls == "hermes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "inputs", "why"),
    [
        (
            "{{ messages[0].content }} <tool_call></tool_call>",
            {"tools": TOOLS},
            "chat template takes no tools",
        ),
        (
            "{{ tools }}{{ messages[0].content }}",
            {"tools": TOOLS},
            "the format of tool calls in this model's chat template",
        ),
        ("{{ messages[0].content }}", {"messages": [*ASKED, made("{}")]}, "takes no tool_calls in messages"),
    ],
)
def test_tools_without_support_in_the_template_are_refused(
    tmp_path: Path, template: str, inputs: dict[str, Any], why: str
) -> None:
    with pytest.raises(ClientError, match=why) as caught:
        prepare(load(tmp_path, template), {"messages": ASKED, **inputs})

    assert (caught.value.status, caught.value.code) == (400, "tools_not_supported")


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls", ["all", [5], [{"function": {}}], [{"function": {"name": "f", "arguments": 5}}]]
)
def test_malformed_tool_calls_in_messages_are_refused(tmp_path: Path, calls: Any) -> None:
    message = {"role": "assistant", "tool_calls": calls}
    with pytest.raises(ClientError, match=r"messages\[2\].tool_calls"):
        prepare(load(tmp_path, CHAT_TEMPLATE), {"messages": [*ASKED, message]})


@pytest.mark.parametrize("arguments", ["[", "", "[]", "5", '{"a": 1}}', "null", "[" * 10_000])
def test_arguments_that_a_model_wrote_wrong_are_rendered_as_an_empty_object(
    tmp_path: Path, arguments: str
) -> None:
    loaded = load(tmp_path, CHAT_TEMPLATE)
    wrong = prepare(loaded, {"messages": [*ASKED, made(arguments)]})
    empty = prepare(loaded, {"messages": [*ASKED, made({})]})

    assert wrong.facts == empty.facts


def test_the_opening_mark_of_calls_is_detokenized_although_it_is_special(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LIST_TEMPLATE)
    ids = written_checkpoints.byte_level().encode("hi").ids
    mark = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("[TOOL_CALLS]")
    plain = load(tmp_path, CHAT_TEMPLATE).text_decoder()
    decoder = processing.load(folder_of(tmp_path, LIST_TEMPLATE), max_seq_len=512).text_decoder()

    assert "".join(map(decoder.push, [*ids, mark])) == "hi[TOOL_CALLS]"
    assert "".join(map(plain.push, [*ids, mark])) == "hi"


@pytest.mark.processes
def test_tool_calls_become_a_guide_of_the_sequence(tmp_path: Path) -> None:
    inputs = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required"}
    result = prepare(load(tmp_path, CHAT_TEMPLATE), inputs)

    assert '"<tool_call>\\n"' in result.facts["guide"]["grammar"]
    assert "weather" in json.dumps(result.facts["guide"])
    assert "guide" not in prepare(load(tmp_path, CHAT_TEMPLATE), {"messages": ASKED}).facts

    steps = plan(
        PlanRequest(
            request_id="r", inputs=msgspec.convert(inputs, Inputs), params=Params(), seed=0,
            limits=Limits(max_seq_len=4096, kv_tokens=4096, default_max_tokens=8),
        )
    )  # fmt: skip
    next(steps)
    done = WalkResult(
        name="prepare", facts=dict(result.facts), outputs={"token_ids": result.handle("token_ids")}
    )
    chain: Any = steps.send(StepResult((done,)))

    assert chain.walks[0].call().args["guide"] == result.facts["guide"]


@pytest.mark.processes
async def test_an_unsupported_schema_of_a_tool_names_the_tools(tmp_path: Path) -> None:
    wrong = {"type": "object", "properties": {"city": {"type": "place"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": wrong}}]
    loaded = load(tmp_path, CHAT_TEMPLATE)

    asked = prepare(loaded, {"messages": ASKED, "tools": tools, "tool_choice": "required"}).guide
    assert asked is not None
    with pytest.raises(ClientError, match=r"^tools: expected a type of .*, found place; name one") as caught:
        await GuideQueue(loaded).check(asked, tenant="")

    assert caught.value.status == 400
    assert "guide" in prepare(loaded, {"messages": ASKED, "tools": tools}).facts  # the model's own affair
