"""Errors about the chat that another API's body was translated to, in the words of that body."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.errors import InvalidParamError
from shared.errors import ClientError

_MESSAGE: Final = re.compile(r"messages\[(\d{1,6})\]")


@dataclass(frozen=True, slots=True)
class BodyWords:
    """The names of a chat's fields in the body.

    Attributes:
        names: patterns of fields, and the names in their place.
        places: the place of each message in the body.
    """

    names: Sequence[tuple[re.Pattern[str], str]]
    places: Sequence[str]

    def place(self, name: str) -> str:
        """The place in the body of a field of the chat."""
        for pattern, written in self.names:
            name = pattern.sub(written, name)
        if (found := _MESSAGE.match(name)) and int(found[1]) < len(self.places):
            return self.places[int(found[1])] + name[found.end() :]
        return name

    def error(self, error: ClientError) -> ClientError:
        """An error about the chat; one that names no field stays as it is."""
        param = getattr(error, "param", None)
        if not isinstance(param, str):
            return error
        named = self.place(param)
        message = error.message.replace(param, named)
        return InvalidParamError(named, message, code=error.failure_code, status=error.failure_status)
