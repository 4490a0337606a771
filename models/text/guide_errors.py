"""Error messages for refused guides: what was expected, what was found, what to do.

llguidance's own errors presume knowledge of its source. The table maps those that clients meet to messages;
others are passed on as they are. Pure.
"""

import re
from typing import Final

_SHOWN_CHARS: Final = 400
_SNIPPET: Final = re.compile(r"\n\s*\d+ \| .*|\n<.*", re.DOTALL)
"""Start of the quotation of the grammar, or of the parser's state, in an error."""
_FORMATS: Final = "date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid, uri"
_SMALLER: Final = (
    "expected a guide with few alternatives at once, found {0}; give it fewer optional "
    "properties or alternatives in one place, fewer ways to read one text, or shorter counted repetitions"
)


class _Explanation:
    """The message for an error that matches `pattern`; `{0}` is its first group."""

    def __init__(self, pattern: str, words: str) -> None:
        self.pattern: Final = re.compile(pattern)
        self.words: Final = words


_TABLE: Final = (
    _Explanation(
        r"Unimplemented keys: \[(.*)\]",
        "expected supported keywords, found {0}; leave them out, or express them by others",
    ),
    _Explanation(
        r"oneOf constraints are not supported",
        "expected branches of oneOf that differ in a type or a constant, found others; give each a "
        "property with another constant, or use anyOf",
    ),
    _Explanation(r"Unknown format: (.*)", f"expected a format of {_FORMATS}, found {{0}}; use a pattern"),
    _Explanation(
        r"Invalid type: (.*)",
        "expected a type of null, boolean, integer, number, string, array, object, found {0}; name one "
        "of these",
    ),
    _Explanation(
        r"min/maxProperties only supported",
        "expected no minProperties or maxProperties together with optional properties, found one; name "
        "all properties in required, or leave it out",
    ),
    _Explanation(
        r"patternProperty regexes (/.*/) and (/.*/) are not disjoint",
        "expected patternProperties that match no name in common, found {0} and {1}; make them exclude "
        "one another",
    ),
    _Explanation(
        r"Resource '(.*)' is not present",
        "expected references within the schema, found {0}; copy the target to $defs",
    ),
    _Explanation(
        r"Pointer '(.*)' does not exist",
        "expected a $ref to a part of the schema, found #{0}, which does not exist; add it",
    ),
    _Explanation(r"Unsatisfiable schema: (.*)", "no text satisfies it: {0}; resolve the contradiction"),
    _Explanation(
        r"^NoExtension",
        "no text satisfies it; give each rule or definition an alternative that does not refer back "
        "to itself",
    ),
    _Explanation(
        r"look-?arounds?\b|WordUnicode",
        "expected a regular expression without look-around, which includes word boundaries; found one; "
        "describe the text itself instead of its surroundings",
    ),
    _Explanation(
        r"backreferences",
        "expected a regular expression without backreferences, found one; repeat the group",
    ),
    _Explanation(
        r"regex parse error: .*error: (.*)",
        "expected a regular expression in the syntax of Rust's regex, found a syntax error: {0}; correct it",
    ),
    _Explanation(r"unknown name: (\".*\")", "expected names of rules, found {0}; add a rule for it"),
    _Explanation(
        r"unknown special token: (\".*\"); following special tokens are available: (.*)",
        "expected one of the tokenizer's special tokens, {1}; found {0}; name one of these",
    ),
    _Explanation(r"no start rule found", "expected a rule with the name start, found none; add it"),
    _Explanation(
        r"duplicate rule: (\".*\")", "expected one rule per name, found {0} twice; join them with |"
    ),
    _Explanation(
        r"^(?:lexer|parser) error$",
        "expected a grammar in llguidance's dialect of Lark, found a syntax error; correct it",
    ),
    _Explanation(r"Current row has (\d+) items; max is (\d+)", _SMALLER.format("{0} items of at most {1}")),
    _Explanation(r"Too many items \(limit (\d+);", _SMALLER.format("more than {0} items")),
    _Explanation(
        r"too many (states|expressions)|too big|ran out of fuel|too large", _SMALLER.format("too many")
    ),
)


def explanation_of(error: str) -> str:
    """The message for a client, for an error of llguidance; at most some hundred characters."""
    plain = " ".join(_SNIPPET.sub("", error).split())
    for entry in _TABLE:
        found = entry.pattern.search(plain)
        if found is not None:
            return entry.words.format(*(group[:_SHOWN_CHARS] for group in found.groups() if group))
    return f"this is not supported: {plain[:_SHOWN_CHARS]}"
