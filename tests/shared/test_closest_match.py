"""Suggestions for misspelt names."""

from shared.closest_match import closest_match, did_you_mean

KNOWN = ("temperature", "top_p", "max_tokens")


def test_the_most_similar_name_is_suggested() -> None:
    assert closest_match("temprature", KNOWN) == "temperature"
    assert did_you_mean("max_tokns", KNOWN) == "did you mean 'max_tokens'?"


def test_nothing_is_suggested_for_a_word_that_is_like_none() -> None:
    assert closest_match("zzz", KNOWN) is None
    assert did_you_mean("zzz", KNOWN, otherwise="expected one of them") == "expected one of them"


def test_the_cutoff_decides_how_similar_is_enough() -> None:
    assert closest_match("maxt", KNOWN) is None
    assert closest_match("maxt", KNOWN, cutoff=0.4) == "max_tokens"
