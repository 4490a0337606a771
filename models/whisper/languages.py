"""The languages of a checkpoint, by code and by English name. No torch."""

from collections.abc import Mapping
from functools import cache

from models.speech_to_text.options import SpeechOptions, UnknownLanguageError
from models.whisper.settings import WhisperSettings
from shared.errors import ClientError


@cache
def _names() -> Mapping[str, str]:
    """The English name of each language of Whisper, by its code: transformers' table."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # noqa: PLC0415 - heavy

    found: Mapping[str, str] = LANGUAGES
    return found


@cache
def _codes() -> Mapping[str, str]:
    """The code of each name, with the other names that some languages have."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # noqa: PLC0415 - heavy

    found: Mapping[str, str] = TO_LANGUAGE_CODE
    return found


class Languages:
    """The languages of one checkpoint."""

    def __init__(self, settings: WhisperSettings) -> None:
        self._settings = settings

    def name_of(self, code: str) -> str:
        """The English name of a language; empty if there is none."""
        return _names().get(code, "")

    def token_of(self, options: SpeechOptions) -> int | None:
        """The token of the language that is asked for; None: it is to be detected, or there is but one.

        Raises:
            ClientError: the model does not know the language or the task.
        """
        known = self._settings.languages
        if options.task != "transcribe" and not (known and options.task in self._settings.tasks):
            raise ClientError(
                "task: this model transcribes English alone, and translates nothing", code="not_supported"
            )
        if options.language is None:
            return None
        asked = options.language.strip().lower()
        code = asked if asked in known else _codes().get(asked, asked)
        if not known and code == "en":
            return None
        if code not in known:
            names = ", ".join(sorted(known)) or "en"
            raise UnknownLanguageError(
                f"language: expected one of {names:.600}, or its name in English; found "
                f"{options.language!r:.80}"
            )
        return known[code]
