"""The parser of reasoning: what it separates, however the text is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.reasoning import FORMATS, HARMONY, THINK, ReasoningFormat
from models.text.reasoning_parser import ReasoningParser, parser_for


def parted(found: ReasoningFormat, pieces: list[str], *, is_inside: bool = False) -> tuple[str, str]:
    """The whole reasoning and the whole content."""
    parser = parser_for(found, is_inside=is_inside)
    parts = [*(parser.push(piece) for piece in pieces), parser.end()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


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
    st.lists(
        st.sampled_from(["<", "/", "think", ">", "O", "C", "N", "F", "\n", " ", "a", "[", "|"]), max_size=30
    ),
    st.lists(st.integers(0, 120), max_size=8),
    st.booleans(),
)
def test_how_a_text_is_cut_makes_no_difference(
    found: ReasoningFormat, words: list[str], cuts: list[int], is_inside: bool
) -> None:
    text = "".join(words).replace("O", found.opens).replace("C", found.closes)
    text = text.replace("N", "<|start|>assistant").replace("F", "<|channel|>final<|message|>")
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]

    whole = parted(found, [text], is_inside=is_inside)

    assert parted(found, pieces, is_inside=is_inside) == whole
    assert parted(found, list(text), is_inside=is_inside) == whole
    assert found is HARMONY or whole[0] == whole[0].rstrip()


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
