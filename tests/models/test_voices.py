"""Names of voices."""

import pytest

from models.voices import is_voice_name, known_voice


@pytest.mark.parametrize("name", ["tara", "Ève", "ऋतिका", "长乐", "voice_2", "a-b", "x" * 64])
def test_a_voice_is_named_by_letters_of_any_script(name: str) -> None:
    assert is_voice_name(name)


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "a b", "a:", "<custom_token_3>", "a\n", "a\u200bb", "a.b", "😀"]
)
def test_a_name_cannot_end_the_voice_or_spell_a_mark(name: str) -> None:
    assert not is_voice_name(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [("tara", "tara"), ("TARA", "tara"), ("leo", "leo"), ("LEO", "LEO"), ("mia", None), ("", None)],
)
def test_case_matters_only_where_two_voices_differ_by_it(name: str, found: str | None) -> None:
    assert known_voice(name, ["tara", "leo", "LEO"]) == found
