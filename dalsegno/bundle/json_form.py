"""A lossless, readable JSON form of stored bytes.

A record has one of three forms:

    {"event": {...}}      MessagePack, value by value
    {"text": "..."}       text: a submission that was written in JSON
    {"bytes": "..."}      base64: neither, or MessagePack in an unusual encoding

In an event, a value that JSON lacks is a map with one key: `{"$bytes": base64}`, or for a map whose keys are
not all plain strings `{"$map": [[key, value], ...]}`. Encoders differ in one respect: some give a short map a
long header, because its type could have had more fields. `"wide"`, next to the event, lists the numbers of
those maps, counted in the order in which they begin.

A record is shown as an event only if that form was turned back into the same bytes.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any, Final

import msgspec

_BYTES: Final = "$bytes"
_MAP: Final = "$map"

_SHORT_MAP: Final = 0x80
_MAP_16: Final = 0xDE
_MAP_32: Final = 0xDF
_SHORT: Final = 15
"""The most entries of a map with a one-byte header."""
_FIXED_BYTES: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
"""The bytes after the first byte of a fixed-length value: constants, floats, integers."""
_LENGTH_BYTES: Final = {
    0xC4: 1,
    0xC5: 2,
    0xC6: 4,
    0xD9: 1,
    0xDA: 2,
    0xDB: 4,
    0xDC: 2,
    0xDD: 4,
    0xDE: 2,
    0xDF: 4,
}
"""The size of the length field of bytes, strings, arrays and maps."""


class UnreadableFormError(ValueError):
    """JSON that has none of the three forms; the message says what was expected and found."""


def form_of(data: bytes) -> dict[str, Any]:
    """Return the most readable form of stored bytes."""
    try:
        form: dict[str, Any] = {"event": _shown(msgspec.msgpack.decode(data))}
        if wide := list(_wide_maps(data)):
            form["wide"] = wide
        if data_of(msgspec.json.decode(msgspec.json.encode(form))) == data:
            return form
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"bytes": _base64(data)}


def data_of(form: dict[str, Any]) -> bytes:
    """Return the bytes of a form.

    Raises:
        UnreadableFormError: it is not a form.
    """
    match form:
        case {"event": event}:
            try:
                return bytes(_Encoding(form.get("wide", ())).encode(_restored(event)))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise UnreadableFormError(f"event: it cannot be written as MessagePack: {error}") from error
        case {"text": str(text)}:
            try:
                return text.encode()
            except UnicodeEncodeError as error:
                raise UnreadableFormError("text: expected Unicode, found a lone surrogate") from error
        case {"bytes": str(text)}:
            return _from_base64(text)
        case _:
            found = ", ".join(form) or "nothing"
            raise UnreadableFormError(f"expected one of event, text and bytes, found {found}")


# ---- JSON ------------------------------------------------------------------------------------------------


def _shown(value: Any) -> Any:
    """Convert a MessagePack value to JSON values."""
    match value:
        case bytes():
            return {_BYTES: _base64(value)}
        case list():
            return [_shown(item) for item in value]
        case dict():
            if all(isinstance(name, str) and not name.startswith("$") for name in value):
                return {name: _shown(item) for name, item in value.items()}
            return {_MAP: [[_shown(name), _shown(item)] for name, item in value.items()]}
        case _:
            return value


def _restored(value: Any) -> Any:
    """Convert the result of `_shown` back."""
    match value:
        case list():
            return [_restored(item) for item in value]
        case {"$bytes": inner} if len(value) == 1:
            if not isinstance(inner, str):
                raise UnreadableFormError(f"{_BYTES}: expected a string in base64, found {inner!r:.80}")
            return _from_base64(inner)
        case {"$map": inner} if len(value) == 1:
            return _map(inner)
        case dict():
            return {name: _restored(item) for name, item in value.items()}
        case _:
            return value


def _map(pairs: Any) -> dict[Any, Any]:
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UnreadableFormError(f"{_MAP}: expected a list of pairs, found {pairs!r:.80}")
    return {_restored(name): _restored(item) for name, item in pairs}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableFormError(f"expected base64, found {text!r:.80}: {error}") from error


# ---- MessagePack -----------------------------------------------------------------------------------------


class _Encoding:
    """The shortest MessagePack encoding, except for the headers of the `wide` maps."""

    def __init__(self, wide: Any) -> None:
        if not isinstance(wide, list | tuple) or not all(isinstance(number, int) for number in wide):
            raise UnreadableFormError(f"wide: expected a list of numbers, found {wide!r:.80}")
        self._wide = frozenset(wide)
        self._maps = 0

    def encode(self, value: Any) -> bytearray:
        into = bytearray()
        self._add(value, into)
        return into

    def _add(self, value: Any, into: bytearray) -> None:
        match value:
            case dict():
                self._add_header(len(value), into)
                for name, item in value.items():
                    self._add(name, into)
                    self._add(item, into)
            case list():
                into += msgspec.msgpack.encode([None] * len(value))[: -len(value) or None]
                for item in value:
                    self._add(item, into)
            case _:
                into += msgspec.msgpack.encode(value)

    def _add_header(self, length: int, into: bytearray) -> None:
        is_wide = self._maps in self._wide
        self._maps += 1
        if length <= _SHORT and not is_wide:
            into.append(_SHORT_MAP | length)
        elif length < 1 << 16:
            into += bytes((_MAP_16, *length.to_bytes(2)))
        else:
            into += bytes((_MAP_32, *length.to_bytes(4)))


def _wide_maps(data: bytes) -> Iterator[int]:
    """Yield the numbers of short maps with a three-byte header; `data` is one whole value."""
    at, maps = 0, 0
    while at < len(data):
        code = data[at]
        at += 1
        if code in _LENGTH_BYTES:
            width = _LENGTH_BYTES[code]
            length = int.from_bytes(data[at : at + width])
            at += width
            if code in (_MAP_16, _MAP_32):
                if code == _MAP_16 and length <= _SHORT:
                    yield maps
                maps += 1
            elif code < 0xDC:  # bytes and strings; arrays and maps continue with their values
                at += length
        elif code in _FIXED_BYTES:
            at += _FIXED_BYTES[code]
        elif 0x80 <= code <= 0x8F:
            maps += 1
        elif 0xA0 <= code <= 0xBF:
            at += code & 0x1F
        elif 0xC1 <= code <= 0xDF:  # extensions: unused
            raise UnreadableFormError(f"MessagePack of type {code:#x}")
