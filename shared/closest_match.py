"""Suggestions for misspelt names in error messages."""

from collections.abc import Iterable


def closest_match(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `word`; None if none is similar enough.

    Args:
        word: the name that was found.
        known: the names that are accepted.
        cutoff: the least similarity, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    from difflib import get_close_matches  # noqa: PLC0415 - needed for a mistake only

    return next(iter(get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return `did you mean 'name'?` for the closest match, or `otherwise` if there is none."""
    match = closest_match(word, known)
    return f"did you mean {match!r}?" if match is not None else otherwise
