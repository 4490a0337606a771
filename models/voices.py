"""Names of the voices of speech models. Pure."""

import unicodedata
from collections.abc import Iterable
from typing import Final

MOST_CHARACTERS: Final = 64
_OTHERS: Final = frozenset("_-")


def is_voice_name(name: str) -> bool:
    """True if the name has letters, marks and digits of any script, `_` and `-` only.

    A model reads the name at the start of its prompt, so a name with other characters could end the prompt's
    first part, or spell a special token.
    """
    return 0 < len(name) <= MOST_CHARACTERS and all(
        char in _OTHERS or unicodedata.category(char)[0] in "LMN" for char in name
    )


def known_voice(name: str, voices: Iterable[str]) -> str | None:
    """The voice of that name, or else the one that differs in case only; None if there is none."""
    known = list(voices)
    if name in known:
        return name
    return next((voice for voice in known if voice.casefold() == name.casefold()), None)
