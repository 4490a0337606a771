"""Strings that must not become a token of a subject."""

from typing import Final

NO_TOKENS: Final = {
    "nothing": "",
    "a dot": "a.b",
    "a space": "a b",
    "a tab": "a\tb",
    "a wildcard": "*",
    "all the rest": ">",
    "a wildcard inside": "a*",
    "a line's end": "a\n",
    "another command": "a\r\nPUB ds.walk.r1 0\r\n",
    "a null byte": "a\x00b",
    "a control character": "a\x1bb",
    "a vertical tab": "a\x0bb",
    "no ASCII": "\u00e9",
    "full width": "\uff41",
    "another script's digit": "\u0663",
    "an invisible mark": "a\u200bb",
    "a slash": "../a",
    "a dollar": "$JS",
    "too long": "x" * 65,
}
