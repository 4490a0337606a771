"""Reasoning in answers: formats, where a prompt leaves it, and what a request asks for."""

from typing import Any

import pytest

from models.text.reasoning import (
    GEMMA,
    HARMONY,
    MISTRAL,
    SEED,
    THINK,
    ReasoningFormat,
    begins_inside,
    budget_of,
    format_in,
    template_options,
)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", THINK),
        ("{{ m.content.split('</think>')[-1] }}", THINK),
        ("[THINK]{{ m.thinking }}[/THINK]", MISTRAL),
        ('{% set ends = "</seed:think>" %}', SEED),
        ("{{- '<|channel>thought\\n<channel|>' -}}", GEMMA),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}", HARMONY),
        ("{{ '<|user|>' + m.content + '<|end|>' }}", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_template_tells_the_format(source: str, found: ReasoningFormat | None) -> None:
    assert format_in(source) is found


@pytest.mark.parametrize(
    ("prompt", "is_inside"),
    [
        ("assistant\n", False),
        ("assistant\n<think>", True),
        ("assistant\n<think>\n", True),
        ("assistant\n<think>\n\n</think>\n\n", None),
        ("<think>a</think>\nassistant\n", False),
    ],
)
def test_the_end_of_a_prompt_tells_whether_the_answer_begins_inside(
    prompt: str, is_inside: bool | None
) -> None:
    assert begins_inside(THINK, prompt) is is_inside


@pytest.mark.parametrize(
    ("options", "effort", "variables", "can_think", "found"),
    [
        ({}, None, {"enable_thinking"}, True, {}),
        ({"enable_thinking": False}, None, {"enable_thinking"}, True, {"enable_thinking": False}),
        ({"enable_thinking": False}, None, {"thinking"}, True, {"thinking": False}),
        ({"enable_thinking": True}, None, set(), True, {}),
        ({"enable_thinking": False}, None, set(), False, {}),
        ({"documents_first": 1}, None, {"documents_first"}, False, {"documents_first": 1}),
        ({}, "none", {"enable_thinking"}, True, {"enable_thinking": False}),
        ({}, "low", {"thinking"}, True, {"thinking": True}),
        ({}, "low", {"reasoning_effort"}, True, {"reasoning_effort": "low"}),
        ({}, "none", set(), False, {}),
        ({}, "high", set(), True, {}),
        ({"enable_thinking": True}, "none", {"enable_thinking"}, True, {"enable_thinking": True}),
    ],
)
def test_a_request_sets_variables_of_the_template(
    options: dict[str, Any], effort: str | None, variables: set[str], can_think: bool, found: dict[str, Any]
) -> None:
    assert template_options(options, effort, frozenset(variables), can_think=can_think) == found


@pytest.mark.parametrize(
    ("options", "effort", "can_think", "problem"),
    [
        ({"x": 1}, None, True, "which are: tone; found 'x'"),
        ({"enable_thinking": False}, None, True, "enable_thinking: this model always thinks"),
        ({"thinking": True}, None, False, "thinking: this model does not think"),
        ({}, "none", True, "reasoning_effort: expected a level of effort, found 'none'"),
        ({}, "high", False, "reasoning_effort: expected 'none', found 'high'"),
    ],
)
def test_what_a_template_cannot_do_is_an_error(
    options: dict[str, Any], effort: str | None, can_think: bool, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        template_options(options, effort, frozenset({"tone"}), can_think=can_think)


def test_an_effort_is_a_limit_where_the_template_takes_none() -> None:
    assert budget_of(None, "low", frozenset()) == 1024
    assert budget_of(7, "low", frozenset()) == 7
    assert budget_of(None, "low", frozenset({"reasoning_effort"})) is None
    assert budget_of(None, "xhigh", frozenset()) is None
    assert budget_of(None, None, frozenset()) is None
    assert budget_of(None, "none", frozenset()) is None
