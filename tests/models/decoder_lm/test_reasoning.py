"""Chats with models that think: prompts against transformers' own, facts, guides, and refused requests."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from models.decoder_lm import processing
from models.decoder_lm.processing import DecoderLmProcessing
from shared.errors import ClientError
from shared.events import Guide, GuideReasoning, Inputs, Params
from shared.tensors import Handle, read_ids
from tests.models import written_checkpoints
from tests.models.decoder_lm.test_tools import load, prepare

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SWITCHED = (
    TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
ALWAYS = TURNS + "<think>\n"
LEVELS = "{{ reasoning_effort | default('medium') }}" + TURNS
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{{ tools | tojson if tools else '' }}"
    "<|start|>assistant"
)
NEVER = "{{ tone | default('') }}{% for m in messages %}{{ m.content }}{% endfor %}"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Is 91 a prime?"}]}


def prompt_of(loaded: DecoderLmProcessing, path: Path, inputs: dict[str, Any]) -> str:
    token_ids = prepare(loaded, inputs).outputs["token_ids"]
    assert isinstance(token_ids, Handle)
    return str(AutoTokenizer.from_pretrained(path).decode(read_ids(token_ids)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "options"),
    [
        (SWITCHED, {}),
        (SWITCHED, {"enable_thinking": True}),
        (SWITCHED, {"enable_thinking": False}),
        (LEVELS, {"reasoning_effort": "high"}),
        (NEVER, {"tone": "kind: "}),
    ],
)
def test_options_reach_the_template_as_in_transformers(
    tmp_path: Path, template: str, options: dict[str, Any]
) -> None:
    loaded = load(tmp_path, template)
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": "No.", "reasoning_content": "7 * 13"},
        {"role": "user", "content": "And 97?"},
    ]

    prompt = prompt_of(loaded, tmp_path, {"messages": turns, "template_options": options})

    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(turns, tokenize=False, **options)
    assert prompt == theirs


STRIPPED = TURNS.replace("{{ m.content }}", "{{ m.content | trim }}")
PARTS = NEVER.replace("{{ m.content }}", "{{ m.content[0].text if m.content is not string else m.content }}")


@pytest.mark.slow
@pytest.mark.parametrize("template", [TURNS, STRIPPED, SWITCHED, ALWAYS, PARTS])
@pytest.mark.parametrize("said", ["No, because", "No, ", " [the answer", "<think>7 * ", "a<|im_end|>b"])
def test_a_begun_answer_is_the_end_of_the_prompt_as_in_transformers(
    tmp_path: Path, template: str, said: str
) -> None:
    loaded = load(tmp_path, template)
    turns = [*ASKED["messages"], {"role": "assistant", "content": said}]

    prompt = prompt_of(loaded, tmp_path, {"messages": turns, "continue_final_message": True})

    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        turns, tokenize=False, continue_final_message=True
    )
    assert prompt == theirs


@pytest.mark.parametrize(
    ("said", "reasoning"),
    [
        ("No.", None),
        ("<think>", {"format": "think", "is_inside": True}),
        ("<think>I", {"format": "think", "is_inside": True}),
        ("<think>a</think>", None),
        ("<think>a</think> b", None),
    ],
)
def test_what_follows_a_begun_answer_is_content_unless_that_is_reasoning(
    tmp_path: Path, said: str, reasoning: Any
) -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": said}]
    inputs = {"messages": turns, "continue_final_message": True}

    facts = prepare(load(tmp_path, SWITCHED), inputs, Params(guide=Guide(json_object=True))).facts

    assert facts.get("reasoning") == reasoning


def test_a_template_that_drops_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    loaded = load(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    turns = [*ASKED["messages"], {"role": "assistant", "content": "No"}]

    with pytest.raises(ClientError, match="does not write the text of the last message"):
        prepare(loaded, {"messages": turns, "continue_final_message": True})


@pytest.mark.parametrize(
    ("template", "inputs", "reasoning"),
    [
        (SWITCHED, {}, {"format": "think"}),
        (SWITCHED, {"template_options": {"enable_thinking": False}}, None),
        (SWITCHED, {"reasoning_effort": "none"}, None),
        (SWITCHED, {"reasoning_effort": "high"}, {"format": "think"}),
        (ALWAYS, {}, {"format": "think", "is_inside": True}),
        (NEVER, {}, None),
    ],
)
def test_the_prompt_tells_what_the_answer_may_begin_with(
    tmp_path: Path, template: str, inputs: dict[str, Any], reasoning: Any
) -> None:
    loaded = load(tmp_path, template)

    assert prepare(loaded, ASKED | inputs).facts.get("reasoning") == reasoning
    assert loaded.reasoning == ("" if template == NEVER else "think")


def test_a_raw_prompt_has_no_reasoning(tmp_path: Path) -> None:
    loaded = load(tmp_path, ALWAYS)

    facts = prepare(loaded, {"text": "<think>", "chat": False}).facts

    assert "reasoning" not in facts
    assert "guide" not in facts


@pytest.mark.parametrize(
    ("template", "inputs", "params", "free"),
    [
        (SWITCHED, {}, Params(guide=Guide(json_object=True)),
         GuideReasoning(opens="<think>", closes="</think>")),
        (ALWAYS, {}, Params(guide=Guide(json_object=True)),
         GuideReasoning(opens="<think>", closes="</think>", is_open=True)),
        (ALWAYS, {}, Params(guide=Guide(json_object=True), thinking_budget=5),
         GuideReasoning(opens="<think>", closes="</think>", is_open=True, max_tokens=5)),
        (SWITCHED, {"reasoning_effort": "low"}, Params(guide=Guide(json_object=True)),
         GuideReasoning(opens="<think>", closes="</think>", max_tokens=1024)),
        (LEVELS, {"reasoning_effort": "low"}, Params(guide=Guide(json_object=True)),
         GuideReasoning(opens="<think>", closes="</think>")),
        (CHANNELS, {}, Params(guide=Guide(json_object=True), thinking_budget=5),
         GuideReasoning(
             opens="<|channel|>analysis<|message|>",
             closes="<|end|><|start|>assistant<|channel|>final<|message|>", max_tokens=5,
         )),
    ],
)  # fmt: skip
def test_a_guide_leaves_the_reasoning_free(
    tmp_path: Path, template: str, inputs: dict[str, Any], params: Params, free: GuideReasoning
) -> None:
    facts = prepare(load(tmp_path, template), ASKED | inputs, params).facts

    assert msgspec.convert(facts["guide"], Guide) == Guide(json_object=True, reasoning=free)


def test_a_limit_alone_is_a_guide_too(tmp_path: Path) -> None:
    facts = prepare(load(tmp_path, ALWAYS), ASKED, Params(thinking_budget=5)).facts

    guide = msgspec.convert(facts["guide"], Guide)
    assert guide.reasoning == GuideReasoning(opens="<think>", closes="</think>", is_open=True, max_tokens=5)
    assert guide.grammar is not None


@pytest.mark.parametrize("params", [Params(), Params(guide=Guide(json_object=True))])
def test_without_reasoning_the_guide_is_that_of_the_request(tmp_path: Path, params: Params) -> None:
    facts = prepare(
        load(tmp_path, SWITCHED), ASKED | {"template_options": {"enable_thinking": False}}, params
    ).facts

    assert "guide" not in facts


def test_a_guide_of_tools_leaves_the_reasoning_free(tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools else '' }}<tool_call></tool_call>" + ALWAYS
    tools = [{"type": "function", "function": {"name": "now"}}]

    facts = prepare(load(tmp_path, template), {**ASKED, "tools": tools, "tool_choice": "required"}).facts

    guide = msgspec.convert(facts["guide"], Guide)
    assert guide.reasoning == GuideReasoning(opens="<think>", closes="</think>", is_open=True)
    assert "now" in str(guide.grammar)


def test_a_call_may_follow_the_reasoning_where_answers_have_channels(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    inputs = {**ASKED, "tools": tools, "tool_choice": "required"}

    guide = msgspec.convert(prepare(load(tmp_path, CHANNELS), inputs).facts["guide"], Guide)

    assert guide.reasoning is not None
    assert guide.reasoning.closes == "<|end|><|start|>assistant"
    assert guide.grammar is not None
    assert "<|channel|>commentary to=functions." in guide.grammar


@pytest.mark.parametrize(
    ("change", "rendered"),
    [
        ({"content": "No."}, "<|channel|>analysis<|message|>7 * 13<|end|><|start|>assistant<|message|>No."),
        (
            {"content": "Wait.", "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]},
            "<|channel|>analysis<|message|>7 * 13\n\nWait.<|end|><|start|>assistant to=functions.now",
        ),
    ],
)
def test_a_template_with_a_key_of_its_own_gets_the_reasoning_there(
    tmp_path: Path, change: dict[str, Any], rendered: str
) -> None:
    turn = {"role": "assistant", "reasoning_content": "7 * 13", **change}

    prompt = prompt_of(load(tmp_path, CHANNELS), tmp_path, {"messages": [*ASKED["messages"], turn]})

    assert f"<|start|>assistant{rendered}" in prompt


@pytest.mark.parametrize(
    ("template", "inputs", "params", "problem"),
    [
        (ALWAYS, {"template_options": {"enable_thinking": False}}, Params(), "this model always thinks"),
        (ALWAYS, {"reasoning_effort": "none"}, Params(), "this model always thinks"),
        (NEVER, {"template_options": {"enable_thinking": True}}, Params(), "this model does not think"),
        (NEVER, {"template_options": {"mood": 1}}, Params(), "which are: tone; found 'mood'"),
        (NEVER, {"reasoning_effort": "high"}, Params(), "this model does not think"),
        (NEVER, {}, Params(thinking_budget=9), "this model does not think"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    tmp_path: Path, template: str, inputs: dict[str, Any], params: Params, problem: str
) -> None:
    with pytest.raises(ClientError, match=problem) as caught:
        prepare(load(tmp_path, template), ASKED | inputs, params)
    assert caught.value.code == "not_supported"


def test_an_option_cannot_replace_what_the_template_gets_anyway(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="found 'messages'"):
        prepare(load(tmp_path, NEVER), ASKED | {"template_options": {"messages": []}})


def test_a_raw_prompt_takes_no_effort() -> None:
    with pytest.raises(ValueError, match="reasoning_effort: expected a chat"):
        Inputs(text="a", chat=False, reasoning_effort="low")


def test_marks_that_are_special_tokens_are_in_the_text(tmp_path: Path) -> None:
    tokenizer = written_checkpoints.byte_level()
    marks = ["<think>", "</think>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    folder = written_checkpoints.save(tmp_path, tokenizer, {**config, "chat_template": ALWAYS})

    decoder = processing.load(folder, max_seq_len=64).text_decoder()

    assert [decoder.push(id) for mark in marks if (id := tokenizer.token_to_id(mark)) is not None] == marks
