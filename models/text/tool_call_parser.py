"""Incremental parser of tool calls in an answer.

A fold over the text of the answer: the concatenated result does not depend on how the text is cut into
pieces, so every gateway reports the same for the same chunks. Text that may be the start of a call is held
back until that is decided, and is emitted as text if it is none. White space around calls is dropped.
"""

import json
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from models.text import tagged_calls
from models.text.named_calls import Named
from models.text.tagged_calls import Tags
from models.text.tool_calls import CallFormat

_ARGUMENTS: Final = ("arguments", "parameters")
_OTHERS: Final = ("type", "id")
_MOST_HELD: Final = 256
"""The most characters that may be held back while it is undecided whether a call starts."""
_Parsing = Generator[None, str, None]
_Char = Generator[None, str, str]


@dataclass(slots=True)
class CallPiece:
    """The new part of one call: its `name` once, at its start, and a piece of its arguments."""

    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedPiece:
    """The new part of an answer: text, and parts of calls by their index."""

    content: str = ""
    calls: dict[int, CallPiece] = field(default_factory=dict)


class _NoCallError(Exception):
    """The text is not a tool call."""


class ToolCallParser:
    """Parses one answer to a request that offers `functions`, with the schemas of their arguments.

    `count` calls have started.
    """

    def __init__(self, call_format: CallFormat, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self.count = 0
        self._format = call_format
        self._functions = functions
        self._parsed = ParsedPiece()
        self._ahead: deque[str] = deque()  # characters to read again, before new ones
        self._held: list[str] = []  # characters read and not yet emitted or dropped
        self._has_content = False
        self._is_call_open = False
        self._is_after_call = False
        self._parsing = self._read()
        next(self._parsing)

    @property
    def held(self) -> int:
        """The number of the last characters that are neither emitted nor dropped."""
        return len(self._held) + len(self._ahead)

    def push(self, text: str) -> ParsedPiece:
        """Parse the next piece of the answer; return what is new."""
        for character in text:
            self._parsing.send(character)
        return self._take()

    def end(self) -> ParsedPiece:
        """End the answer; return what was held back."""
        while self._held and not self._is_call_open and not self._is_after_call:
            if self.count and "".join(self._held).isspace():
                break
            self._emit_first()
            self._ahead.extend(self._held)
            self._held.clear()
            self._parsing.close()
            self._parsing = self._read()
            next(self._parsing)
        return self._take()

    def _take(self) -> ParsedPiece:
        parsed, self._parsed = self._parsed, ParsedPiece()
        return parsed

    def _emit(self, text: str) -> None:
        self._has_content = self._has_content or not text.isspace()
        self._parsed.content += text

    def _emit_first(self) -> None:
        self._emit(self._held.pop(0))

    # ---- characters ------------------------------------------------------------------------------------
    def _next(self) -> _Char:
        """The next character; it is held back until it is known what it belongs to."""
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
        """Read the last character again."""
        self._ahead.appendleft(self._held.pop())

    def _give_all_back(self) -> None:
        self._ahead.extendleft(reversed(self._held))
        self._held.clear()

    def _read(self) -> _Parsing:
        while True:
            yield from self._text()
            try:
                yield from self._calls()
            except _NoCallError:
                self._emit_first()
                self._give_all_back()  # a call may start within it

    def _text(self) -> _Parsing:
        """Emit text up to the start of a call."""
        while True:
            yield from self._next()
            while self._held:
                opening = "".join(self._held).lstrip()
                if opening in self._openers:
                    return
                is_short = len(self._held) <= _MOST_HELD
                if is_short and (not opening or any(opener.startswith(opening) for opener in self._openers)):
                    break
                self._emit_first()

    @property
    def _openers(self) -> tuple[str, ...]:
        is_bare = self._format.is_bare and not self._has_content
        return (self._format.opens, "{") if is_bare else (self._format.opens,)

    # ---- calls ---------------------------------------------------------------------------------------
    def _calls(self) -> _Parsing:
        """Parse all calls after one opening mark."""
        if self._format.is_section:
            yield from self._call()
            while not (yield from self._skips(self._format.closes)):
                yield from self._call()
            self._held.clear()
            return
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

    def _closing(self) -> _Parsing:
        """Parse the closing mark of a call, which some models omit."""
        self._is_after_call = True
        for expected in self._format.closes:
            is_first = not "".join(self._held).strip()
            if (yield from (self._next_solid() if is_first else self._next())) != expected:
                self._give_all_back()
                break
        self._is_after_call = False
        self._held.clear()

    def _call(self) -> _Parsing:
        """Parse one call.

        Raises:
            _NoCallError: it is something else, or names no function, and nothing of it was emitted yet.
        """
        tags, named = self._format.tags, self._format.named
        try:
            if named is not None:
                yield from self._named(named)
            else:
                yield from (self._object() if tags is None else self._tagged(tags))
        except _NoCallError:
            if not self._is_call_open:
                raise
            self._give_back()
        self._is_call_open = False
        self._held.clear()

    def _object(self) -> _Parsing:
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
                    self._add_arguments(early)
            elif key in _ARGUMENTS and not self._is_call_open and early is None:
                if name is not None:
                    self._begin(name)
                early = yield from self._value(is_emitted=name is not None)
            elif key in _OTHERS and not self._is_call_open:
                yield from self._value(is_emitted=False)
            else:
                raise _NoCallError
        if name is None:
            raise _NoCallError
        if early is None:
            self._begin(name)
            self._add_arguments("{}")

    def _checked(self, name: str) -> str:
        if not name or (self._format.is_bare and name not in self._functions):
            raise _NoCallError
        return name

    def _begin(self, name: str) -> None:
        self._is_call_open = True
        self._parsed.calls[self.count] = CallPiece(name)
        self.count += 1

    def _add_arguments(self, text: str) -> None:
        piece = self._parsed.calls.setdefault(self.count - 1, CallPiece())
        piece.arguments += text

    # ---- names in front of arguments -----------------------------------------------------------------
    def _named(self, named: Named) -> _Parsing:
        """Parse a name and its arguments, with what surrounds them."""
        if named.opens_name and not (yield from self._skips(named.opens_name)):
            raise _NoCallError
        name = ""
        character = yield from self._next_solid()
        while character.isalnum() or character in "_-.":
            name += character
            character = yield from self._next()
        self._give_back()
        if not name:
            raise _NoCallError
        between = ""
        while not between.endswith(named.ends_name):
            between += yield from self._next()
            if len(name) + len(between) > _MOST_HELD:
                raise _NoCallError
        if (yield from self._next_solid()) != "{":
            raise _NoCallError
        self._give_back()
        self._begin(name)
        if named.quote:
            yield from self._marked_value(named.quote, self._functions.get(name))
        else:
            yield from self._value(is_emitted=True)
        if named.closes_arguments:
            yield from self._skips(named.closes_arguments.lstrip())

    def _marked_value(self, quote: str, schema: Mapping[str, Any] | None) -> _Parsing:
        """Emit a value of Gemma's syntax as JSON (`models.text.gemma_arguments`).

        A model may mark what is no string by its schema.
        """
        character = yield from self._next_solid()
        if character in "{[":
            yield from self._marked_container(character, quote, schema or {})
            return
        if character == '"':  # some write JSON all the same
            self._add_arguments((yield from self._string()))
            return
        self._give_back()
        if not (yield from self._skips(quote)):
            self._add_arguments(tagged_calls.value_of((yield from self._bare(",}]"))))
        elif tagged_calls.is_text(schema):
            self._add_arguments('"')
            yield from self._text_until((quote,))
            self._add_arguments('"')
        else:
            self._add_arguments(tagged_calls.value_of((yield from self._until(quote))))

    def _marked_container(self, opening: str, quote: str, schema: Mapping[str, Any]) -> _Parsing:
        """Emit an object or an array of Gemma's syntax; its opening bracket has been read."""
        self._add_arguments(opening)
        closing = "}" if opening == "{" else "]"
        within = schema.get("items")
        separator = ""
        while (character := (yield from self._next_solid())) != closing:
            if character != ",":
                self._give_back()
            self._add_arguments(separator)
            separator = ", "
            if opening == "{":
                if (yield from self._skips(quote)):
                    key = yield from self._until(quote)
                else:
                    key = (yield from self._bare(":")).strip('"')
                if (yield from self._next_solid()) != ":":
                    raise _NoCallError
                self._add_arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
                within = schema.get("properties", {}).get(key)
            yield from self._marked_value(quote, within)
        self._add_arguments(closing)

    def _bare(self, ends: str) -> _Char:
        """Read a text without marks, up to one of these characters."""
        text = ""
        while (character := (yield from self._next())) not in ends:
            text += character
        self._give_back()
        return text.strip()

    # ---- tags ----------------------------------------------------------------------------------------
    def _tagged(self, tags: Tags) -> _Parsing:
        """Parse a name and arguments between tags; what follows them is left."""
        if tags.opens_name and not (yield from self._skips(tags.opens_name)):
            raise _NoCallError
        name = yield from self._name(tags)
        properties = self._functions.get(name, {}).get("properties", {})
        self._begin(name)
        self._add_arguments("{")
        separator = ""
        while (yield from self._skips(tags.opens_key)):
            key = yield from self._until(tags.closes_key)
            is_text = tagged_calls.is_text(properties.get(key))
            if any(tags.kinds):
                is_text = (yield from self._until(">")) in tags.kinds[0]
            if tags.opens_value:
                yield from self._skips(tags.opens_value)
            self._add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._tagged_value(tags, is_text=is_text)
            separator = ", "
        if tags.closes_call:
            yield from self._skips(tags.closes_call)
        self._add_arguments("}")

    def _name(self, tags: Tags) -> _Char:
        """Read a function's name.

        Raises:
            _NoCallError: it is none.
        """
        name = ""
        character = yield from self._next_solid()
        while character not in ("\n", "<", tags.closes_name[:1] or "\n"):
            name += character
            if len(name) > _MOST_HELD or not (character.isalnum() or character in "_-."):
                raise _NoCallError
            character = yield from self._next()
        for place, expected in enumerate(tags.closes_name):
            if place > 0:
                character = yield from self._next()
            if character != expected:
                raise _NoCallError
        if character == "<":
            self._give_back()
        if not name:
            raise _NoCallError
        return name

    def _skips(self, mark: str) -> Generator[None, str, bool]:
        """Skip white space and a mark; false, and nothing is skipped, if something else follows."""
        taken: list[str] = []
        for place, expected in enumerate(mark):
            character = yield from self._next()
            taken.append(character)
            while place == 0 and character.isspace():
                character = yield from self._next()
                taken.append(character)
            if character != expected:
                if self._is_call_open:
                    self._held.clear()
                else:
                    del self._held[len(self._held) - len(taken) :]
                self._ahead.extendleft(reversed(taken))
                return False
        return True

    def _until(self, mark: str) -> _Char:
        """Read up to a mark, and the mark."""
        text = ""
        while not text.endswith(mark):
            text += yield from self._next()
        return text.removesuffix(mark)

    def _tagged_value(self, tags: Tags, *, is_text: bool) -> _Parsing:
        """Emit a value as JSON: a string as it is read, others at their end."""
        ends = (f"\n{tags.closes_value}", tags.closes_value) if tags.has_lines else (tags.closes_value,)
        if tags.has_lines and (yield from self._next()) != "\n":
            self._give_back()
        if is_text:
            self._add_arguments('"')
            yield from self._text_until(ends)
            self._add_arguments('"')
            return
        text = ""
        while not text.endswith(ends):
            text += yield from self._next()
        end = next(one for one in ends if text.endswith(one))
        self._add_arguments(tagged_calls.value_of(text.removesuffix(end)))

    def _text_until(self, ends: tuple[str, ...]) -> _Parsing:
        """Emit a text up to one of these marks as the inside of a JSON string, while it is read."""
        text = ""
        while not text.endswith(ends):
            count = len(text) - tagged_calls.held_back(text, ends)
            self._add_arguments(_quoted(text[:count]))
            text = text[count:] + (yield from self._next())
        end = next(one for one in ends if text.endswith(one))
        self._add_arguments(_quoted(text.removesuffix(end)))

    # ---- JSON ----------------------------------------------------------------------------------------
    def _string(self) -> _Char:
        """Read a JSON string after its opening quote; return it with both quotes."""
        text = '"'
        is_escaped = False
        while True:
            character = yield from self._next()
            text += character
            if character == '"' and not is_escaped:
                return text
            is_escaped = character == "\\" and not is_escaped

    def _value(self, *, is_emitted: bool) -> _Char:
        """Read a JSON value; return its source, or of a string the content.

        Args:
            is_emitted: emit it as arguments while it is read.
        """
        character = yield from self._next_solid()
        if character == '"':
            text = _decoded((yield from self._string()))
            if is_emitted:
                self._add_arguments(text)
            return text
        text, depth, is_quoted, is_escaped = "", 0, False, False
        while True:
            if not is_quoted and depth == 0 and (character in ",}]" or character.isspace()):
                self._give_back()
                return text
            text += character
            if is_emitted:
                self._add_arguments(character)
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
    """The content of a JSON string.

    Raises:
        _NoCallError: it is not valid JSON.
    """
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _NoCallError from error


def call_id(request_id: str, choice: int, index: int, call_format: CallFormat) -> str:
    """The id of a call: the same on every gateway and in every reading of the answer."""
    digest = blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if call_format.has_short_ids else f"call_{digest}"


def _quoted(text: str) -> str:
    """A piece of a JSON string, without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
