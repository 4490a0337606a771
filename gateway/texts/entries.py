"""The texts and images of a request's body, each with its place.

"a text"                     a text
[101, 2023, 102]             the token ids of a text
{"text": "a text"}           Jina's and Cohere's objects
{"image": "https://..."}     an image: an address, a data URL, the id of a stored file, or base64
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import InvalidParamError
from gateway.media import sources
from gateway.media.content_kinds import IMAGE
from gateway.media.sources import MediaSource
from shared.validation_errors import described

Text = str | list[int]
_ADDRESSES: Final = ("data:", "http://", "https://", sources.FILE_PREFIX)
"""The beginnings of strings that say where an image is; other strings are its base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A text or an image.

    Attributes:
        where: its place in the body, for errors.
        text: the text, or its token ids; empty for an image.
        image: the source of the image; None for a text.
    """

    where: str
    text: Text = ""
    image: MediaSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryReader:
    """Reads the entries in the field `name`.

    Attributes:
        check_modality: called with a modality and its place; it refuses what the model does not take.
        most: the largest number of entries, and `setting` is its name in the configuration.
        allows_more: an object may have further fields beside its text, such as a title.
        takes_ids: an entry may be a list of token ids.
    """

    name: str
    check_modality: Callable[[str, str], None]
    most: int
    setting: str
    allows_more: bool = False
    takes_ids: bool = True

    @property
    def _expected(self) -> str:
        ids = ", token ids" if self.takes_ids else ""
        return f"a text{ids}, or an object with text or image"

    def read(self, found: object) -> list[Entry]:
        """Read one entry, or a list of them.

        Raises:
            InvalidParamError: an entry is wrong, or there are none or too many.
        """
        if isinstance(found, str | dict) or _is_ids(found):
            return [self._entry(self.name, found)]
        if not isinstance(found, list) or not found:
            raise InvalidParamError(
                self.name, f"{self.name}: expected {self._expected}, or a list of them, {_found(found)}"
            )
        if len(found) > self.most:
            raise InvalidParamError(
                self.name,
                f"{self.name}: expected at most {self.most} entries in one request ({self.setting}), "
                f"found {len(found)}",
            )
        return [self._entry(f"{self.name}[{number}]", one) for number, one in enumerate(found)]

    def read_one(self, found: object) -> Entry:
        """Read the only entry.

        Raises:
            InvalidParamError: it is wrong.
        """
        return self._entry(self.name, found)

    def _entry(self, where: str, found: object) -> Entry:
        if isinstance(found, dict):
            return self._object(where, found)
        if isinstance(found, str):
            return Entry(where=where, text=self._checked(where, found))
        if _is_ids(found) and self.takes_ids:
            return Entry(where=where, text=self._ids(where, found))
        raise InvalidParamError(self.name, f"{where}: expected {self._expected}, {_found(found)}")

    def _object(self, where: str, found: dict[str, Any]) -> Entry:
        given = [name for name in ("text", "image") if found.get(name) is not None]
        more = [name for name, value in found.items() if name not in ("text", "image") and value is not None]
        if len(given) != 1 or (more and not self.allows_more):
            names = ", ".join(found) or "nothing"
            raise InvalidParamError(
                self.name, f"{where}: expected an object with either text or image, found {names[:200]}"
            )
        place = f"{where}.{given[0]}"
        if given == ["image"]:
            self.check_modality(IMAGE, place)
            return Entry(where=where, image=_image(place, found["image"]))
        if not isinstance(found["text"], str):
            raise InvalidParamError(
                self.name, f"{place}: expected a string, found {described(found['text'])}"
            )
        return Entry(where=where, text=self._checked(place, found["text"]))

    def _checked(self, where: str, text: str) -> str:
        if not text:
            raise InvalidParamError(self.name, f"{where}: expected a text, not empty, {_found(text)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParamError(
                self.name, f"{where}: expected valid Unicode, found a lone surrogate"
            ) from error
        return text

    def _ids(self, where: str, found: Any) -> list[int]:
        for number, one in enumerate(found):
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 2**31:
                raise InvalidParamError(
                    self.name, f"{where}[{number}]: expected a token id, found {described(one)}"
                )
        return list(found)


def _image(where: str, found: object) -> MediaSource:
    if isinstance(found, str) and found and not found.lower().startswith(_ADDRESSES):
        return sources.of_base64(where, found, modality=IMAGE)
    return sources.of_text(where, found, IMAGE)


def _is_ids(found: object) -> bool:
    """A list that begins with a number is meant as token ids."""
    return isinstance(found, list) and bool(found) and isinstance(found[0], int)


def _found(found: object) -> str:
    return f"found {described(found)}"


def places(entries: Sequence[Entry]) -> list[str]:
    """Return the places of entries in the body."""
    return [entry.where for entry in entries]
