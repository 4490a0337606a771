"""What is said of a guide that is refused: what was expected, what was found, what to do.

llguidance says what it met, to those who know its source. What clients run into has words of its own here, by
the shape of what the library says; what is not in the table is passed on as it is. Pure.
"""

import re
from typing import Final

_SHOWN_CHARS: Final = 400
_SNIPPET: Final = re.compile(r"\n\s*\d+ \| .*|\n<.*", re.DOTALL)
"""Where an error's quotation of the grammar, and of the state, begins."""
_FORMATS: Final = "date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid, uri"
_SMALLER: Final = (
    "expected a guide of which little has to be kept in mind at once, found {0}; give it fewer optional "
    "properties or alternatives in one place, fewer ways to read one text, or shorter counted repetitions"
)


class _Words:
    """What is said where llguidance says what this matches; `{0}` is its first group."""

    def __init__(self, pattern: str, words: str) -> None:
        self.pattern: Final = re.compile(pattern)
        self.words: Final = words


_TABLE: Final = (
    _Words(
        r"Unimplemented keys: \[(.*)\]",
        "expected keywords that can be kept, found {0}; leave that out, or say it with others",
    ),
    _Words(
        r"oneOf constraints are not supported",
        "expected branches of oneOf that a type or a constant tells apart, found others; give each a "
        "property that is another constant, or say anyOf",
    ),
    _Words(r"Unknown format: (.*)", f"expected a format of {_FORMATS}, found {{0}}; say it as a pattern"),
    _Words(
        r"Invalid type: (.*)",
        "expected a type of null, boolean, integer, number, string, array, object, found {0}; name one "
        "of these",
    ),
    _Words(
        r"min/maxProperties only supported",
        "expected no minProperties or maxProperties beside optional properties, found one; name all "
        "properties in required, or leave it out",
    ),
    _Words(
        r"patternProperty regexes (/.*/) and (/.*/) are not disjoint",
        "expected patternProperties of which no name matches two, found {0} and {1}; make them exclude "
        "one another",
    ),
    _Words(
        r"Resource '(.*)' is not present",
        "expected references into the schema itself, found {0}; copy what it names to $defs",
    ),
    _Words(
        r"Pointer '(.*)' does not exist",
        "expected a $ref to something in the schema, found #{0}, which is not there; add it",
    ),
    _Words(
        r"Unsatisfiable schema: (.*)", "no text can be what it asks for: {0}; mend what contradicts itself"
    ),
    _Words(
        r"^NoExtension",
        "no text can be what it asks for; see that each rule or definition has an end that does not "
        "lead back to itself",
    ),
    _Words(
        r"look-?arounds?\b|WordUnicode",
        "expected a regular expression without look-around, to which word boundaries belong; found one; "
        "say what is to be there, instead of what is beside it",
    ),
    _Words(
        r"backreferences",
        "expected a regular expression without references back, found one; repeat what it refers to",
    ),
    _Words(
        r"regex parse error: .*error: (.*)",
        "expected a regular expression in the syntax of Rust's regex, found one that cannot be read: "
        "{0}; mend it there",
    ),
    _Words(r"unknown name: (\".*\")", "expected names that have a rule, found {0}; write a rule for it"),
    _Words(
        r"unknown special token: (\".*\"); following special tokens are available: (.*)",
        "expected one of the tokenizer's marks, {1}; found {0}; name one of these",
    ),
    _Words(r"no start rule found", "expected a rule that is called start, found none; add it"),
    _Words(r"duplicate rule: (\".*\")", "expected one rule of a name, found {0} twice; join them with |"),
    _Words(
        r"^(?:lexer|parser) error$",
        "expected a grammar in llguidance's dialect of Lark, found what cannot be read; mend it there",
    ),
    _Words(r"Current row has (\d+) items; max is (\d+)", _SMALLER.format("{0} things of at most {1}")),
    _Words(r"Too many items \(limit (\d+);", _SMALLER.format("more than {0} things")),
    _Words(r"too many (states|expressions)|too big|ran out of fuel|too large", _SMALLER.format("too many")),
)


def in_our_words(said: str) -> str:
    """What llguidance said of a guide, as a client is told; at most some hundred characters."""
    plain = " ".join(_SNIPPET.sub("", said).split())
    for entry in _TABLE:
        found = entry.pattern.search(plain)
        if found is not None:
            return entry.words.format(*(group[:_SHOWN_CHARS] for group in found.groups() if group))
    return f"this cannot be kept: {plain[:_SHOWN_CHARS]}"
