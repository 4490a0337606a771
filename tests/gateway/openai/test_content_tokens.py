"""The tokens of an answer's content, among those of its reasoning and its calls."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.answer_reader import AnswerParts
from gateway.openai.content_tokens import ContentTokens
from gateway.openai.tool_calls import ToolCalling
from models.text import reasoning, tool_calls
from shared.events import OutputChunk
from tests.gateway.openai.test_logprobs import token

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NOTHING = AnswerParts()
THINKS = AnswerParts(reasoning=reasoning.THINK)
CALLS = AnswerParts(tool_calling=ToolCalling(tool_calls.HERMES, {"f": {}}))
BOTH = AnswerParts(tool_calling=CALLS.tool_calling, reasoning=reasoning.THINK)


def found(parts: AnswerParts, chunks: list[OutputChunk], finish_reason: str = "stop") -> list[str]:
    """The texts of the tokens of the content."""
    tokens = ContentTokens(parts.reader("r", 0))
    listed = [one for chunk in chunks for one in tokens.push(chunk)] + tokens.end(finish_reason)
    return [one.token.token.decode(errors="replace") for one in listed]


def in_chunks(pieces: list[str], size: int) -> list[OutputChunk]:
    """An answer of these tokens, so many per chunk."""
    groups = [pieces[n : n + size] for n in range(0, len(pieces), size)]
    return [OutputChunk(text="".join(one), logprobs=[token(piece) for piece in one]) for one in groups]


@pytest.mark.parametrize("size", [1, 2, 3, 99])
@pytest.mark.parametrize(
    ("parts", "pieces", "expected"),
    [
        (NOTHING, ["a", " b", "<think>"], ["a", " b", "<think>"]),
        (THINKS, ["<think>", "\n", "yes", "</think>", "\n\n", "yes", "."], ["yes", "."]),
        (THINKS, ["<th", "ink>", "a", "</", "think>", "a", "b"], ["a", "b"]),
        (THINKS, ["<think>", "a", "</think>\n", "\nHi", "!"], ["\nHi", "!"]),  # white space and a word
        (THINKS, ["a", "</think>"], ["a", "</think>"]),  # an answer that does not begin with reasoning
        (THINKS, ["<think>", "a", "b"], []),
        (CALLS, ["See", ".", "\n", CALL[:5], CALL[5:]], ["See", "."]),
        (CALLS, [CALL, "\n", CALL], []),
        (CALLS, ["a", " <", "tool_", " b"], ["a", " <", "tool_", " b"]),  # held back, and no call
        (CALLS, ["a", " <tool_"], ["a", " <tool_"]),  # held back to the end
        (CALLS, ["a", CALL, " Done"], ["a", " Done"]),
        (BOTH, ["<think>", CALL, "</think>", "\n", "Now", CALL, "\n"], ["Now"]),
    ],
)
def test_tokens_of_content_are_found(
    parts: AnswerParts, pieces: list[str], expected: list[str], size: int
) -> None:
    assert found(parts, in_chunks(pieces, size)) == expected


@given(
    st.sampled_from([THINKS, CALLS, BOTH]),
    st.lists(
        st.sampled_from(["<", "think>", "</think>", "<think>", "<tool_call>", "\n", " ", "a", "b", CALL]),
        max_size=20,
    ),
    st.lists(st.integers(1, 20), max_size=6),
)
def test_chunks_make_no_difference_and_the_tokens_spell_the_content(
    parts: AnswerParts, pieces: list[str], cuts: list[int]
) -> None:
    """Every token is one character here, so that none belongs to two parts."""
    characters = list("".join(pieces))
    places = sorted({0, len(characters), *(min(cut, len(characters)) for cut in cuts)})
    chunks = [in_chunks(characters[a:b], 99_999)[0] for a, b in pairwise(places)]

    tokens = found(parts, chunks, "length")

    assert tokens == found(parts, in_chunks(characters, 1), "length")
    assert "".join(tokens) == content_of(parts, "".join(characters))


def content_of(parts: AnswerParts, text: str) -> str:
    reader = parts.reader("r", 0)
    assert reader is not None
    deltas: list[dict[str, Any]] = [reader.push(OutputChunk(text=text)), reader.end()]
    return "".join(delta.get("content", "") for delta in deltas)


@given(
    st.sampled_from([NOTHING, CALLS]),
    st.lists(st.sampled_from(["a", "b", "<", "<s>", " "]), min_size=1, max_size=12),
    st.sets(st.integers(0, 12)),
)
def test_tokens_that_are_not_in_the_text_hide_no_others(
    parts: AnswerParts, pieces: list[str], cuts: set[int]
) -> None:
    """`<s>` is a special token: its text is not sent, although it may begin as that does."""
    chunks = []
    for a, b in pairwise(sorted({0, len(pieces), *(min(cut, len(pieces)) for cut in cuts)})):
        text = "".join(piece for piece in pieces[a:b] if piece != "<s>")
        chunks.append(OutputChunk(text=text, logprobs=[token(piece) for piece in pieces[a:b]]))

    assert found(parts, chunks, "length") == pieces


def test_an_answer_that_begins_within_its_reasoning() -> None:
    chunks = in_chunks(["a", "</think>", "b"], 1)
    inside = OutputChunk(text="", metadata={reasoning.BEGINS_INSIDE: True})

    assert found(THINKS, [inside, *chunks]) == found(THINKS, [_with(inside, chunks[0]), *chunks[1:]]) == ["b"]


def _with(first: OutputChunk, chunk: OutputChunk) -> OutputChunk:
    return OutputChunk(text=chunk.text, logprobs=chunk.logprobs, metadata=first.metadata)


def test_a_character_that_the_limit_cut_off_is_listed() -> None:
    chunks = [OutputChunk(text="a", logprobs=[token("a")]), OutputChunk(text="", logprobs=[token(b"\xc3")])]

    assert found(NOTHING, chunks, "length") == ["a", "\ufffd"]
