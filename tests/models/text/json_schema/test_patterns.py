"""Translation of patterns."""

import pytest

from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.patterns import translation_of


@pytest.mark.parametrize(
    ("pattern", "narrow"),
    [
        ("^a+?b*$", "^a+?b*$"),
        ("^{x}$", r"^\{x\}$"),
        ("a{2,}", "a{2,}"),
        (r"\/\<\-", r"\/<\-"),
        (r"\u00e9\x41", "éA"),
        ("(?<year>[0-9])", r"(?:[0-9--\x00])"),
        ("[[:alpha:]]", r"[\[:alpha:--\x00]\]"),
        ("[a&&b]", r"[a\&\&b--\x00]"),
        ("[^a]", r"[^\x00a]"),
        (r"\d", r"[0-9--\x00]"),
        ("(?i)a", "(?i)a"),
    ],
)
def test_a_pattern_in_rust(pattern: str, narrow: str) -> None:
    assert translation_of(pattern).narrow == narrow


@pytest.mark.parametrize("pattern", ["^[a-z]+$", "^x-", "a|b", r"\u00e9", "[^a]"])
def test_both_translations_are_equal_if_validators_agree(pattern: str) -> None:
    assert translation_of(pattern).narrow == translation_of(pattern).wide


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"\cA", r"\\c"),
        (r"\A", r"\\A"),
        (r"\0", r"\\0"),
        (r"\ud83d\ude00", r"\\ud83d"),
        ("(?s).", r"\(\?s\)"),
        ("a**", "another one"),
        ("a{,3}", "{,"),
        ("[]a]", "none"),
        ("[a", "no ]"),
        (r"\pL", r"\\pL"),
        ("\x01", r"U\+0001"),
        ("a\\", r"\\;"),
    ],
)
def test_what_validators_read_differently_is_refused(pattern: str, found: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=f"expected .*, found {found}"):
        translation_of(pattern)
