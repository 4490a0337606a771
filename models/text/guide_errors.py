"""Error messages for refused guides: what was expected, what was found, what to do.

llguidance's own errors presume knowledge of its source. The table maps those that clients meet to messages;
others are passed on as they are. Pure.
"""

import re
from collections.abc import Mapping
from typing import Final

_SHOWN_CHARS: Final = 400
_SNIPPET: Final = re.compile(r"\n\s*\d+ \| .*|\n<.*", re.DOTALL)
"""Start of the quotation of the grammar, or of the parser's state, in an error."""
_FORMATS: Final = "date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid, uri"
_SMALLER: Final = (
    "expected a guide with few alternatives at once, found {0}; give it fewer optional "
    "properties or alternatives in one place, fewer ways to read one text, or shorter counted repetitions"
)
_MESSAGES: Final[Mapping[str, str]] = {
    r"Unimplemented keys: \[(.*)\]": (
        "expected supported keywords, found {0}; leave them out, or express them by others"
    ),
    r"oneOf constraints are not supported": (
        "expected branches of oneOf that differ in a type or a constant, found others; give each a "
        "property with another constant, or use anyOf"
    ),
    r"Unknown format: (.*)": f"expected a format of {_FORMATS}, found {{0}}; use a pattern",
    r"Invalid type: (.*)": (
        "expected a type of null, boolean, integer, number, string, array, object, found {0}; name one "
        "of these"
    ),
    r"min/maxProperties only supported": (
        "expected no minProperties or maxProperties together with optional properties, found one; name "
        "all properties in required, or leave it out"
    ),
    r"patternProperty regexes (/.*/) and (/.*/) are not disjoint": (
        "expected patternProperties that match no name in common, found {0} and {1}; make them exclude "
        "one another"
    ),
    r"Resource '(.*)' is not present": (
        "expected references within the schema, found {0}; copy the target to $defs"
    ),
    r"Pointer '(.*)' does not exist": (
        "expected a $ref to a part of the schema, found #{0}, which does not exist; add it"
    ),
    r"Regex is empty": (
        "no text satisfies it: none matches pattern, format and length together; resolve the contradiction"
    ),
    r"Unsatisfiable schema: (.*)": "no text satisfies it: {0}; resolve the contradiction",
    r"^NoExtension": (
        "no text satisfies it; give each rule or definition an alternative that does not refer back to itself"
    ),
    r"look-?arounds?\b|WordUnicode": (
        "expected a regular expression without look-around, which includes word boundaries; found one; "
        "describe the text itself instead of its surroundings"
    ),
    r"backreferences": "expected a regular expression without backreferences, found one; repeat the group",
    r"regex parse error: .*error: (.*)": (
        "expected a regular expression in the syntax of Rust's regex, found a syntax error: {0}; correct it"
    ),
    r"unknown name: (\".*\")": "expected names of rules, found {0}; add a rule for it",
    r"unknown special token: (\".*\"); following special tokens are available: (.*)": (
        "expected one of the tokenizer's special tokens, {1}; found {0}; name one of these"
    ),
    r"no start rule found": "expected a rule with the name start, found none; add it",
    r"duplicate rule: (\".*\")": "expected one rule per name, found {0} twice; join them with |",
    r"^(?:lexer|parser) error$": (
        "expected a grammar in llguidance's dialect of Lark, found a syntax error; correct it"
    ),
    r"Current row has (\d+) items; max is (\d+)": _SMALLER.format("{0} items of at most {1}"),
    r"Too many items \(limit (\d+);": _SMALLER.format("more than {0} items"),
    r"too many (states|expressions)|too big|ran out of fuel|too large": _SMALLER.format("too many"),
}
"""By the pattern of an error, the message for it; `{0}` is the pattern's first group."""


def explanation_of(error: str) -> str:
    """The message for a client, for an error of llguidance; at most some hundred characters."""
    plain = " ".join(_SNIPPET.sub("", error).split())
    for pattern, message in _MESSAGES.items():
        found = re.search(pattern, plain)
        if found is not None:
            return message.format(*(group[:_SHOWN_CHARS] for group in found.groups() if group))
    return f"this is not supported: {plain[:_SHOWN_CHARS]}"
