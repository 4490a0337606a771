"""The bound is never above the number of tokens, and refuses long texts of any kind without encoding them."""

import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from models.text.token_bound import TokenBound, token_bound_of
from models.text.tokenizer import load_tokenizer

DEMO = Path(__file__).parents[3] / "configs" / "demo" / "checkpoint"
KINDS = [
    "\N{OWL}\N{ROCKET}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "e\N{COMBINING ACUTE ACCENT}", "word ", "7", " ", "\n\n", "-=", "<|im_end|>", "\0",
]  # fmt: skip


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    tokenizer, _ = load_tokenizer(DEMO)
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "added":
        tokenizer.add_tokens([AddedToken("\N{OWL}" * 20 + " " * 40, normalized=False)])
    return tokenizer


@cache
def bound_of(kind: str) -> TokenBound:
    bound = token_bound_of(tokenizer_of(kind))
    assert bound is not None
    return bound


@pytest.mark.parametrize("kind", ["plain", "nfc", "added"])
@given(
    parts=st.lists(st.one_of(st.sampled_from(KINDS), st.text(max_size=5)), max_size=20),
    times=st.integers(1, 50),
)
def test_no_text_has_fewer_tokens_than_the_bound(kind: str, parts: list[str], times: int) -> None:
    tokenizer, text = tokenizer_of(kind), "".join(parts) * times
    bound = bound_of(kind)

    assert bound.least(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("unit", [unit for unit in KINDS if unicodedata.is_normalized("NFC", unit)])
def test_a_text_of_one_kind_is_bounded_by_the_longest_tokens_of_that_kind(unit: str) -> None:
    assert bound_of("plain").least(unit * 30_000) > 2048


def test_there_is_no_bound_where_bytes_can_vanish() -> None:
    dropping = Tokenizer.from_str(tokenizer_of("plain").to_str())
    dropping.normalizer = normalizers.Strip()
    assert token_bound_of(dropping) is None
    stripping = Tokenizer.from_str(tokenizer_of("plain").to_str())
    stripping.add_tokens([AddedToken("<|wide|>", lstrip=True)])
    assert token_bound_of(stripping) is None
