"""The voice that a request names."""

from typing import Any

from gateway.errors import InvalidParamError
from gateway.served_model import ServedModel
from models.voices import known_voice
from shared.validation_errors import described


def voice_named(where: str, given: str | dict[str, Any] | None, served: ServedModel) -> str | None:
    """The voice's name, as a string or in an object; `where` is the field.

    Raises:
        InvalidParamError: the model has no such voice.
    """
    name = given.get("id") if isinstance(given, dict) else given
    if given is not None and (not isinstance(name, str) or known_voice(name, served.voices) is None):
        raise InvalidParamError(
            where, f"{where}: expected one of {', '.join(served.voices)}, found {described(name)}"
        )
    return name
