"""Languages by code and by English name: transformers' table of Whisper. No torch."""

from collections.abc import Mapping
from functools import cache


@cache
def language_names() -> Mapping[str, str]:
    """The English name of each language, such as `german`, by its code."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # noqa: PLC0415 - heavy

    found: Mapping[str, str] = LANGUAGES
    return found


@cache
def language_codes() -> Mapping[str, str]:
    """The code of each name, with the other names that some languages have."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # noqa: PLC0415 - heavy

    found: Mapping[str, str] = TO_LANGUAGE_CODE
    return found
