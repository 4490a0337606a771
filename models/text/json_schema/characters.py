r"""Characters that guided JSON cannot spell: control characters without a short escape.

`\uXXXX` is not allowed in guided JSON, because patterns and property names would not be compared with what it
means. JSON has no other spelling for these characters, and llguidance leaves them out of a text.
"""

from typing import Final

_SHORT_ESCAPES: Final = frozenset(map(ord, "\b\t\n\f\r"))
_FIRST_PRINTABLE: Final = 0x20
_DELETE: Final = 0x7F


def is_spelled(code_point: int) -> bool:
    """True if guided JSON can contain the character."""
    is_control = code_point < _FIRST_PRINTABLE or code_point == _DELETE
    return not is_control or code_point in _SHORT_ESCAPES


def unspelled_in(text: str) -> str:
    """The first character of a text that guided JSON cannot contain, as U+XXXX; empty if there is none."""
    return next((f"U+{ord(char):04X}" for char in text if not is_spelled(ord(char))), "")
