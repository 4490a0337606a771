"""The languages of a checkpoint, by code and by English name. No torch."""

from models.speech_to_text.language_names import language_codes, language_names
from models.speech_to_text.options import SpeechOptions, UnknownLanguageError
from models.whisper.settings import WhisperSettings
from shared.errors import ClientError


class Languages:
    """The languages of one checkpoint."""

    def __init__(self, settings: WhisperSettings) -> None:
        self._settings = settings

    def name_of(self, code: str) -> str:
        """The English name of a language; empty if there is none."""
        return language_names().get(code, "")

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
        code = asked if asked in known else language_codes().get(asked, asked)
        if not known and code == "en":
            return None
        if code not in known:
            names = ", ".join(sorted(known)) or "en"
            raise UnknownLanguageError(
                f"language: expected one of {names:.600}, or its name in English; found "
                f"{options.language!r:.80}"
            )
        return known[code]
