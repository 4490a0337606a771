"""Calls of tools, read from an answer as it comes.

A fold over the text: however it is cut into pieces, what comes out, put together, is the same, so that every
gateway tells the same of the same chunks. What may be the beginning of a call is held back until that is
decided; what then is none is said as it stands. White space beside calls is nobody's.
"""

from collections import deque
from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import msgspec

from models.text.tool_calls import CallFormat

_ARGUMENTS: Final = ("arguments", "parameters")
_OTHERS: Final = ("type", "id")
_MOST_HELD: Final = 256
"""How many characters beside a call may wait for it."""
_Reading = Generator[None, str, None]
_Char = Generator[None, str, str]


@dataclass(slots=True)
class CallPiece:
    """What is new of one call: its `name` when it begins, and then more of its arguments."""

    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """What is new of an answer: text, and calls by their index."""

    content: str = ""
    calls: dict[int, CallPiece] = field(default_factory=dict)


class _NoCallError(Exception):
    """What was read is no call."""


class ToolCallReader:
    """Reads one answer.

    Args:
        written: how its model writes calls.
        functions: the names of those it was offered.

    Attributes:
        count: how many calls have begun.
    """

    def __init__(self, written: CallFormat, functions: Collection[str]) -> None:
        self.count = 0
        self._format = written
        self._functions = functions
        self._said = Said()
        self._ahead: deque[str] = deque()  # to be read before what comes
        self._held: list[str] = []  # read, and neither said nor dropped yet
        self._has_content = False
        self._is_call_open = False
        self._is_behind_call = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> Said:
        """Read a piece of the answer; what is new."""
        for character in text:
            self._reading.send(character)
        return self._take()

    def end(self) -> Said:
        """The answer is complete; what is left of it."""
        while self._held and not self._is_call_open and not self._is_behind_call:
            if self.count and "".join(self._held).isspace():
                break
            self._say_first()
            self._ahead.extend(self._held)
            self._held.clear()
            self._reading.close()
            self._reading = self._read()
            next(self._reading)
        return self._take()

    def _take(self) -> Said:
        said, self._said = self._said, Said()
        return said

    def _say(self, text: str) -> None:
        self._has_content = self._has_content or not text.isspace()
        self._said.content += text

    def _say_first(self) -> None:
        self._say(self._held.pop(0))

    # ---- one character after the other ---------------------------------------------------------------
    def _next(self) -> _Char:
        """The next character; it is held until it is known what it belongs to."""
        character = self._ahead.popleft() if self._ahead else (yield)
        if self._is_call_open:
            self._held.clear()
        self._held.append(character)
        return character

    def _next_solid(self) -> _Char:
        character = yield from self._next()
        while character.isspace():
            character = yield from self._next()
        return character

    def _give_back(self) -> None:
        """The last character is read again."""
        self._ahead.appendleft(self._held.pop())

    def _give_all_back(self) -> None:
        self._ahead.extendleft(reversed(self._held))
        self._held.clear()

    def _read(self) -> _Reading:
        while True:
            yield from self._text()
            try:
                yield from self._calls()
            except _NoCallError:
                self._say_first()
                self._give_all_back()  # perhaps one begins within it

    def _text(self) -> _Reading:
        """What is said, up to where a call begins."""
        while True:
            yield from self._next()
            while self._held:
                begun = "".join(self._held).lstrip()
                if begun in self._openers:
                    return
                is_short = len(self._held) <= _MOST_HELD
                if is_short and (not begun or any(opener.startswith(begun) for opener in self._openers)):
                    break
                self._say_first()

    @property
    def _openers(self) -> tuple[str, ...]:
        is_bare = self._format.is_bare and not self._has_content
        return (self._format.opens, "{") if is_bare else (self._format.opens,)

    # ---- calls ---------------------------------------------------------------------------------------
    def _calls(self) -> _Reading:
        """All calls behind one opening."""
        if not self._format.is_array:
            if self._held[-1] == "{":
                self._give_back()
            yield from self._call()
            yield from self._closing()
            return
        if (yield from self._next_solid()) != "[":
            raise _NoCallError
        yield from self._call()
        while (yield from self._next_solid()) == ",":
            self._held.clear()
            yield from self._call()
        if self._held[-1] != "]":
            self._give_back()
        self._held.clear()

    def _closing(self) -> _Reading:
        """The text behind a call, which some models forget."""
        self._is_behind_call = True
        for expected in self._format.closes:
            is_first = not "".join(self._held).strip()
            if (yield from (self._next_solid() if is_first else self._next())) != expected:
                self._give_all_back()
                break
        self._is_behind_call = False
        self._held.clear()

    def _call(self) -> _Reading:
        """One JSON object.

        Raises:
            _NoCallError: it is something else, or names no function; as long as nothing of it was said.
        """
        try:
            yield from self._object()
        except _NoCallError:
            if not self._is_call_open:
                raise
            self._give_back()
        self._is_call_open = False
        self._held.clear()

    def _object(self) -> _Reading:
        if (yield from self._next_solid()) != "{":
            raise _NoCallError
        name: str | None = None
        early: str | None = None
        while (character := (yield from self._next_solid())) != "}":
            if character == ",":
                character = yield from self._next_solid()
            if character != '"':
                raise _NoCallError
            key = _decoded((yield from self._string()))
            if (yield from self._next_solid()) != ":":
                raise _NoCallError
            if key == "name" and name is None:
                if (yield from self._next_solid()) != '"':
                    raise _NoCallError
                name = self._checked(_decoded((yield from self._string())))
                if early is not None:
                    self._begin(name)
                    self._argue(early)
            elif key in _ARGUMENTS and not self._is_call_open and early is None:
                if name is not None:
                    self._begin(name)
                early = yield from self._value(is_said=name is not None)
            elif key in _OTHERS and not self._is_call_open:
                yield from self._value(is_said=False)
            else:
                raise _NoCallError
        if name is None:
            raise _NoCallError
        if early is None:
            self._begin(name)
            self._argue("{}")

    def _checked(self, name: str) -> str:
        if not name or (self._format.is_bare and name not in self._functions):
            raise _NoCallError
        return name

    def _begin(self, name: str) -> None:
        self._is_call_open = True
        self._said.calls[self.count] = CallPiece(name)
        self.count += 1

    def _argue(self, text: str) -> None:
        piece = self._said.calls.setdefault(self.count - 1, CallPiece())
        piece.arguments += text

    # ---- JSON ----------------------------------------------------------------------------------------
    def _string(self) -> _Char:
        """The rest of a string behind its first quote; the whole of it."""
        text = '"'
        is_escaped = False
        while True:
            character = yield from self._next()
            text += character
            if character == '"' and not is_escaped:
                return text
            is_escaped = character == "\\" and not is_escaped

    def _value(self, *, is_said: bool) -> _Char:
        """A value as it is written; where it `is_said`, it is as it comes. A string says what is in it."""
        character = yield from self._next_solid()
        if character == '"':
            text = _decoded((yield from self._string()))
            if is_said:
                self._argue(text)
            return text
        text, depth, is_quoted, is_escaped = "", 0, False, False
        while True:
            if not is_quoted and depth == 0 and (character in ",}]" or character.isspace()):
                self._give_back()
                return text
            text += character
            if is_said:
                self._argue(character)
            if is_quoted:
                is_quoted = is_escaped or character != '"'
                is_escaped = character == "\\" and not is_escaped
            elif character == '"':
                is_quoted = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if depth == 0:
                    return text
            character = yield from self._next()


def _decoded(text: str) -> str:
    """What a JSON string says.

    Raises:
        _NoCallError: it is none.
    """
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _NoCallError from error


def call_id(request_id: str, choice: int, index: int, written: CallFormat) -> str:
    """The id of a call: the same whoever reads the answer, and however often."""
    digest = blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if written.has_short_ids else f"call_{digest}"
