import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.harness import EOS, ByteDecoder
from workers.generation.generated_text import GeneratedText


def answer(
    *,
    max_tokens: int = 100,
    ignore_eos: bool = False,
    stop: tuple[str, ...] = (),
    stop_token_ids: bytes = b"",
) -> GeneratedText:
    return GeneratedText(
        ByteDecoder(),
        max_tokens=max_tokens,
        eos_ids=[EOS],
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        stop=stop,
    )


def fold(folded: GeneratedText, tokens: bytes) -> str:
    """Push tokens until the text ends."""
    text = ""
    for token in tokens:
        if folded.finish_reason is not None:
            break
        text += folded.push(token)
    return text


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (b"ab\x00", {}, ("ab", "stop", 3)),
        (b"ab\x00cd", {"ignore_eos": True, "max_tokens": 5}, ("ab\x00cd", "length", 5)),
        (b"abcd", {"max_tokens": 3}, ("abc", "length", 3)),
        (b"ab.cd", {"stop": (".",)}, ("ab", "stop", 3)),
        (b"ab.", {"stop": (".",), "max_tokens": 3}, ("ab", "stop", 3)),
        (b"ab.\x00", {"stop": (".c",)}, ("ab.", "stop", 4)),
        (b"ab.", {"stop": (".c",), "max_tokens": 3}, ("ab.", "length", 3)),
        (b"abc", {"stop": ("abcd", "bc"), "max_tokens": 3}, ("a", "stop", 3)),
        (b"a\xc3", {"max_tokens": 2}, ("a\ufffd", "length", 2)),
        (b"a\xc3\x00", {}, ("a\ufffd", "stop", 3)),
        (b"a\xc3\x00", {"stop": ("\ufffd",)}, ("a", "stop", 3)),
        (b"a", {"max_tokens": 1}, ("a", "length", 1)),
        (b"\x00", {}, ("", "stop", 1)),
        (b"ab", {}, ("ab", None, 2)),
        (b"abcd", {"stop_token_ids": b"xc"}, ("ab", "stop", 3)),
        (b"a\x00bc", {"stop_token_ids": b"c", "ignore_eos": True}, ("a\x00b", "stop", 4)),
    ],
)
def test_how_an_answer_ends(
    tokens: bytes, options: dict[str, object], expected: tuple[str, str | None, int]
) -> None:
    folded = answer(**options)  # type: ignore[arg-type] # a table of keyword arguments

    text = fold(folded, tokens)

    assert (text, folded.finish_reason, folded.tokens) == expected


@given(tokens=st.lists(st.sampled_from(b"ab.\xc3\xbc\x00"), max_size=20).map(bytes), at=st.integers(0, 20))
def test_folded_again_over_what_it_had_an_answer_goes_on_the_same(tokens: bytes, at: int) -> None:
    whole, before = answer(stop=("a.", "b")), answer(stop=("a.", "b"))
    text = fold(whole, tokens)
    first = fold(before, tokens[:at])
    again = answer(stop=("a.", "b"))

    assert fold(again, tokens[:at]) == first
    if again.finish_reason is None:
        assert first + fold(again, tokens[at:]) == text
    assert (again.finish_reason, again.tokens) == (whole.finish_reason, whole.tokens)


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (b"ab\x00", {}, 0),
        (b"ab.cd", {"stop": (".", "x")}, "."),
        (b"abcd", {"stop_token_ids": b"xc"}, ord("c")),
        (b"abc", {"stop": ("abcd", "bc"), "max_tokens": 3}, "bc"),
        (b"ab.\x00", {"stop": (".c",)}, 0),
        (b"abcd", {"max_tokens": 3}, None),
        (b"ab", {}, None),
    ],
)
def test_the_string_or_token_that_ended_an_answer_is_known(
    tokens: bytes, options: dict[str, object], expected: str | int | None
) -> None:
    folded = answer(**options)  # type: ignore[arg-type] # a table of keyword arguments
    fold(folded, tokens)

    assert folded.stop_reason == expected
