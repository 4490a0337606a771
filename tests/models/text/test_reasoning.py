"""Reasoning in answers: formats, where a prompt leaves it, the parser, and what a request asks for."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.reasoning import (
    FORMATS,
    GEMMA,
    MISTRAL,
    SEED,
    THINK,
    ReasoningFormat,
    ReasoningParser,
    begins_inside,
    budget_of,
    format_in,
    template_options,
)


def parted(found: ReasoningFormat, pieces: list[str], *, is_inside: bool = False) -> tuple[str, str]:
    """The whole reasoning and the whole content."""
    parser = ReasoningParser(found, is_inside=is_inside)
    parts = [*(parser.push(piece) for piece in pieces), parser.end()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", THINK),
        ("{{ m.content.split('</think>')[-1] }}", THINK),
        ("[THINK]{{ m.thinking }}[/THINK]", MISTRAL),
        ('{% set ends = "</seed:think>" %}', SEED),
        ("{{- '<|channel>thought\\n<channel|>' -}}", GEMMA),
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
    ("text", "is_inside", "parts"),
    [
        ("<think>\nlet me see\n</think>\n\nYes.", False, ("let me see", "Yes.")),
        (" \n<think>a</think>b", False, ("a", "b")),
        ("a</think> b \n", True, ("a", "b \n")),
        ("<think></think>b", False, ("", "b")),
        ("</think>b", True, ("", "b")),
        ("<think>a", False, ("a", "")),
        ("a\n</thin", True, ("a\n</thin", "")),
        ("<thin", False, ("", "<thin")),
        ("  <thinner> is", False, ("", "  <thinner> is")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("<think>1 < 2 </ 3</think>x", False, ("1 < 2 </ 3", "x")),
        ("", True, ("", "")),
        (" ", False, ("", " ")),
    ],
)
def test_an_answer_is_parted(text: str, is_inside: bool, parts: tuple[str, str]) -> None:
    assert parted(THINK, [text], is_inside=is_inside) == parts


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.sampled_from(["<", "/", "think", ">", "O", "C", "\n", " ", "a", "[", "|"]), max_size=30),
    st.lists(st.integers(0, 120), max_size=8),
    st.booleans(),
)
def test_how_a_text_is_cut_makes_no_difference(
    found: ReasoningFormat, words: list[str], cuts: list[int], is_inside: bool
) -> None:
    text = "".join(words).replace("O", found.opens).replace("C", found.closes)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]

    whole = parted(found, [text], is_inside=is_inside)

    assert parted(found, pieces, is_inside=is_inside) == whole
    assert parted(found, list(text), is_inside=is_inside) == whole
    assert whole[0] == whole[0].rstrip()


def test_reasoning_is_passed_on_as_it_arrives() -> None:
    parser = ReasoningParser(THINK, is_inside=True)

    assert parser.push("one two").reasoning == "one two"
    assert parser.push(" three\n").reasoning == " three"
    assert parser.push("</th").reasoning == ""
    assert parser.push("e </").reasoning == "\n</the"
    assert [parser.push("think>").content, parser.push(" b").content] == ["", "b"]


@pytest.mark.parametrize(("text", "is_inside"), [("a", True), ("a</think", True), ("a</think>", False)])
def test_the_parser_knows_whether_the_closing_mark_is_to_come(text: str, is_inside: bool) -> None:
    parser = ReasoningParser(THINK, is_inside=True)
    parser.push(text)

    assert parser.is_inside is is_inside


@pytest.mark.parametrize(
    ("text", "has_reasoned", "has_ended"),
    [
        ("<thi", False, False),
        ("<think>", True, False),
        ("<think>a</think>", True, True),
        ("No.", False, True),
    ],
)
def test_the_parser_knows_what_there_was(text: str, has_reasoned: bool, has_ended: bool) -> None:
    parser = ReasoningParser(THINK, is_inside=False)
    parser.push(text)

    assert (parser.has_reasoned, parser.has_ended) == (has_reasoned, has_ended)


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
