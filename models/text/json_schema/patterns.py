r"""Translation of patterns from the regular expressions of JSON schemas (ECMA 262) to Rust's `regex`.

Validators disagree about some constructs: for Python `\w` includes letters of all scripts, for ECMA it does
not; a line separator is matched by `.` in Python only. The *narrow* translation matches texts that match for
all of them, the *wide* one texts that match for any. What has another meaning in Rust (`[[:alpha:]]`,
`[a&&b]`, `\<`) is translated to its meaning in ECMA, or refused.
"""

import re
from typing import Final, NamedTuple

from models.text.json_schema.characters import is_spelled
from models.text.json_schema.errors import UnsupportedSchemaError

_COUNTED: Final = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_GROUP_NAME: Final = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_LEFT_TO_COMPILER: Final = ("(?=", "(?!", "(?<=", "(?<!")
"""Look-around, which the compiler refuses."""
_CODE_POINT: Final = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY: Final = re.compile(r"[pP]\{\^?[\w= ]+\}")
_NAMED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_SPECIAL: Final = frozenset("\\.+*?()|[]{}^$#&-~/")
_SURROGATES: Final = range(0xD800, 0xE000)
_LARGEST: Final = 0x10FFFF

_NARROW_SPACES: Final = r" \t\n\r\f\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_WIDE_SPACES: Final = _NARROW_SPACES + r"\x0b\x1c-\x1f\x{85}\x{feff}"
_WIDE_LETTERS: Final = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}"
_MEMBERS: Final = {
    # the members of a class: in the narrow translation, in the wide one
    "d": ("0-9", r"\p{Nd}"),
    "D": (r"[^\p{Nd}]", "[^0-9]"),
    "w": ("0-9A-Za-z_", _WIDE_LETTERS),
    "W": (f"[^{_WIDE_LETTERS}]", "[^0-9A-Za-z_]"),
    "s": (_NARROW_SPACES, _WIDE_SPACES),
    "S": (f"[^{_WIDE_SPACES}]", f"[^{_NARROW_SPACES}]"),
}
_ANY: Final = (r"[^\x00\n\r\x{2028}\x{2029}]", r"[^\x00\n]")


class Translation(NamedTuple):
    """A pattern for Rust's `regex`.

    Attributes:
        narrow: matches the texts that match for all validators.
        wide: matches the texts that match for any.
    """

    narrow: str
    wide: str


def translation_of(pattern: str) -> Translation:
    """Translate a pattern.

    Raises:
        UnsupportedSchemaError: it needs a character that guided JSON cannot contain, or is ambiguous.
    """
    return Translation(narrow_translation_of(pattern), _Scanner(pattern, wide=True).translated())


def narrow_translation_of(pattern: str) -> str:
    """Translate a pattern to one that matches what matches for all validators.

    Raises:
        UnsupportedSchemaError: as `translation_of` does.
    """
    return _Scanner(pattern, wide=False).translated()


class _Scanner:
    """Translates a pattern, from left to right."""

    def __init__(self, pattern: str, *, wide: bool) -> None:
        self._pattern = pattern
        self._wide = wide
        self._at = 0

    def translated(self) -> str:
        found: list[str] = []
        while self._at < len(self._pattern):
            found.append(self._next())
        return "".join(found)

    def _next(self) -> str:
        """The translation of the next part, which is consumed."""
        char = self._pattern[self._at]
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char in "*+?{":
            return self._quantifier()
        self._at += 1
        if char == ".":
            return _ANY[self._wide]
        if char in "^$|)":
            return char
        return self._literal(char)

    def _refuse(self, expected: str, found: str) -> UnsupportedSchemaError:
        return UnsupportedSchemaError(
            f"pattern {self._pattern!r}: expected {expected}, found {found}; describe the text without it"
        )

    def _literal(self, char: str) -> str:
        if not is_spelled(ord(char)):
            raise self._refuse("characters that guided JSON can contain", f"U+{ord(char):04X}")
        return _spelled(char)

    # ---- groups and quantifiers --------------------------------------------------------------------
    def _group(self) -> str:
        if not self._pattern.startswith("(?", self._at):
            self._at += 1
            return "("
        for opening in ("(?:", *_LEFT_TO_COMPILER):
            if self._pattern.startswith(opening, self._at):
                self._at += len(opening)
                return opening
        if self._pattern.startswith("(?i)", self._at):
            self._at += 4
            return "(?i)"
        named = _GROUP_NAME.match(self._pattern, self._at)
        if named is None:
            raise self._refuse(
                "groups (...), (?:...) or (?<name>...)", self._pattern[self._at : self._at + 4]
            )
        self._at = named.end()
        return "(?:"

    def _quantifier(self) -> str:
        """A quantifier with its `?`; a brace that is none is a literal."""
        counted = _COUNTED.match(self._pattern, self._at)
        if self._pattern[self._at] == "{" and counted is None:
            if self._pattern.startswith("{,", self._at):
                raise self._refuse("a lower limit of repetitions", "{,")
            self._at += 1
            return r"\{"
        start, self._at = self._at, counted.end() if counted is not None else self._at + 1
        if self._pattern.startswith("?", self._at):
            self._at += 1
        found = self._pattern[start : self._at]
        if self._pattern.startswith(("*", "+", "?"), self._at) or _COUNTED.match(self._pattern, self._at):
            raise self._refuse("one quantifier", f"another one after {found}")
        return found

    # ---- escapes -----------------------------------------------------------------------------------
    def _escape(self) -> str:
        """An escape outside of a class."""
        name = self._pattern[self._at + 1 : self._at + 2]
        if name in _MEMBERS:
            self._at += 2
            return _class_of(_MEMBERS[name][self._wide])
        if name and name in "bB123456789":  # word boundaries and backreferences, which the compiler refuses
            self._at += 2
            return f"\\{name}"
        if name in ("p", "P"):
            return _class_of(self._property())
        return self._literal(self._escaped_character())

    def _property(self) -> str:
        found = _PROPERTY.match(self._pattern, self._at + 1)
        if found is None:
            raise self._refuse(r"a property as \p{...}", self._pattern[self._at : self._at + 3])
        self._at = found.end()
        return f"\\{found[0]}"

    def _escaped_character(self) -> str:
        """The character that an escape stands for."""
        self._at += 1
        name = self._pattern[self._at : self._at + 1]
        code = _CODE_POINT.match(self._pattern, self._at)
        if code is not None:
            point = int(code[1] or code[2] or code[3], 16)
            if point in _SURROGATES or point > _LARGEST:
                raise self._refuse("characters", f"\\{code[0]}, which is none by itself")
            self._at = code.end()
            return chr(point)
        self._at += 1
        if name in _NAMED:
            return _NAMED[name]
        if not name or name.isalnum():
            raise self._refuse("escapes of ECMA 262", f"\\{name}")
        return name

    # ---- classes -----------------------------------------------------------------------------------
    def _class(self) -> str:
        self._at += 1
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        if self._pattern.startswith("]", self._at):
            raise self._refuse("members of a class", "none")
        members: list[str] = []
        has_spelled = False
        while not self._pattern.startswith("]", self._at):
            member, is_possible = self._member(wide=self._wide != is_negated)
            members.append(member)
            has_spelled |= is_possible
        self._at += 1
        if not has_spelled and not is_negated:
            raise self._refuse("characters that guided JSON can contain", "a class of control characters")
        return _class_of("".join(members), is_negated=is_negated)

    def _member(self, *, wide: bool) -> tuple[str, bool]:
        """A member of a class, and true if guided JSON can contain some of it."""
        start = self._pattern[self._at : self._at + 2]
        if start[:1] == "\\" and start[1:] in _MEMBERS:
            self._at += 2
            return _MEMBERS[start[1:]][wide], True
        if start in (r"\p", r"\P"):
            return self._property(), True
        first = self._member_character()
        is_range = self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)
        if not is_range or self._pattern[self._at + 1 : self._at + 3] in {rf"\{name}" for name in _MEMBERS}:
            return _spelled(first), is_spelled(ord(first))
        self._at += 1
        last = self._member_character()
        has_spelled = any(
            is_spelled(point) for point in range(ord(first), min(ord(last), ord(first) + 32) + 1)
        )
        return f"{_spelled(first)}-{_spelled(last)}", has_spelled

    def _member_character(self) -> str:
        if self._at >= len(self._pattern):
            raise self._refuse("a class that ends", "no ]")
        if self._pattern.startswith(r"\b", self._at):
            self._at += 2
            return "\b"
        if self._pattern[self._at] == "\\":
            return self._escaped_character()
        self._at += 1
        return self._pattern[self._at - 1]


def _class_of(members: str, *, is_negated: bool = False) -> str:
    """A class of characters, without U+0000.

    Guided JSON cannot contain it, and llguidance 1.9 adds quotes and backslashes to a class of all control
    characters: `[^"]` would match a quote.
    """
    return f"[^\\x00{members}]" if is_negated else f"[{members}--\\x00]"


def _spelled(char: str) -> str:
    """A character, as itself or as a code point."""
    if char in _SPECIAL:
        return f"\\{char}"
    return char if char.isprintable() else f"\\x{{{ord(char):x}}}"
