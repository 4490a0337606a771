"""The file of accepted differences: intended changes, each with its reason, author and expiry. Pure.

    - event: node.ready
      field: walks[*].args.ignore_eos
      from: true                     # optional, as is `to`: this change of the value only
      to: false
      reason: the option ends with release 2
      author: mo@example.org
      expires: 2027-03-31

An entry accepts a group of differences of any level. An entry that accepts nothing, or has expired, fails the
gate: the file says what is different *now*.
"""

from collections.abc import Sequence
from datetime import date
from typing import Any, Final

import msgspec
import yaml

from dalsegno.gate.differences import Difference, as_json
from shared.errors import ClientError

_REQUIRED: Final = ("event", "field", "reason", "author", "expires")
_OPTIONAL: Final = ("from", "to")
_MANY_CHARS: Final = 80


class AcceptFileError(ClientError):
    """The file is malformed; the message names the entry and the key."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted group of differences.

    Attributes:
        place: its number in the file, from 1.
        values: under `from` and `to`, the values to which it is limited.
    """

    place: int
    event: str
    field: str
    reason: str
    author: str
    expires: date
    values: dict[str, Any] = {}

    @property
    def name(self) -> str:
        limits = "".join(f" {key} {as_json(value)}" for key, value in self.values.items())
        return f"{self.event} {self.field}{limits}"

    def is_expired(self, today: date) -> bool:
        """True from the day after `expires`."""
        return today > self.expires

    def accepts(self, one: Difference) -> bool:
        sides = {"from": one.recorded, "to": one.found}
        return (
            self.event == one.event
            and self.field == one.field
            and all(_same(sides[key], value) for key, value in self.values.items())
        )


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Differences after the file was applied.

    Attributes:
        open: the differences that no entry accepts.
        accepted: by entry, the differences that it accepts.
        unused, expired: entries that fail the gate.
    """

    open: list[Difference]
    accepted: list[tuple[Entry, list[Difference]]]
    unused: list[Entry]
    expired: list[Entry]


def read(text: str, name: str) -> list[Entry]:
    """Read the file.

    Raises:
        AcceptFileError: it is malformed.
    """
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise AcceptFileError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return []
    if not isinstance(data, list):
        raise AcceptFileError(f"{name}: expected a list of entries, found {_kind(data)}")
    entries = [_entry(one, place, f"{name}, entry {place}") for place, one in enumerate(data, 1)]
    first: dict[str, int] = {}
    for one in entries:
        if one.name in first:
            raise AcceptFileError(
                f"{name}, entry {one.place}: field: entry {first[one.name]} has the same values"
            )
        first[one.name] = one.place
    return entries


def _entry(data: Any, place: int, where: str) -> Entry:
    if not isinstance(data, dict):
        raise AcceptFileError(f"{where}: expected keys {', '.join(_REQUIRED)}; found {_kind(data)}")
    known = (*_REQUIRED, *_OPTIONAL)
    for key in data:
        if key not in known:
            raise AcceptFileError(
                f"{where}: unknown key {str(key)[:_MANY_CHARS]!r}; expected {', '.join(known)}"
            )
    for key in _REQUIRED:
        if key not in data:
            raise AcceptFileError(f"{where}: {key} is missing")
    texts = {key: _text(data[key], f"{where}: {key}") for key in ("event", "field", "reason", "author")}
    return Entry(
        place=place,
        expires=_date(data["expires"], f"{where}: expires"),
        values={key: data[key] for key in _OPTIONAL if key in data},
        **texts,
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise AcceptFileError(f"{where}: expected a text, found {_kind(value)}")
    return value.strip()


def _date(value: Any, where: str) -> date:
    if type(value) is date:
        return value
    try:
        return date.fromisoformat(value if isinstance(value, str) else "")
    except ValueError as error:
        raise AcceptFileError(f"{where}: expected a date as in 2027-01-31, found {_kind(value)}") from error


def _kind(value: Any) -> str:
    return {list: "a list", dict: "a map", type(None): "nothing"}.get(type(value), repr(value)[:_MANY_CHARS])


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def judged(differences: Sequence[Difference], entries: Sequence[Entry], today: date) -> Judged:
    """Apply the entries: the first one that accepts a difference is used by it."""
    valid = [one for one in entries if not one.is_expired(today)]
    accepted: dict[int, list[Difference]] = {one.place: [] for one in valid}
    rest: list[Difference] = []
    for difference in differences:
        entry = next((one for one in valid if one.accepts(difference)), None)
        (rest if entry is None else accepted[entry.place]).append(difference)
    return Judged(
        open=rest,
        accepted=[(one, accepted[one.place]) for one in valid if accepted[one.place]],
        unused=[one for one in valid if not accepted[one.place]],
        expired=[one for one in entries if one.is_expired(today)],
    )
