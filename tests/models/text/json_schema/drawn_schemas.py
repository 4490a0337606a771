"""Hypothesis strategies for JSON schemas over all supported keywords, and for changes of a value."""

import math
from random import Random
from typing import Any, Final

from hypothesis import strategies as st

Schemas = st.SearchStrategy[Any]

_NAMES: Final = st.sampled_from(["a", "b", "c", "é", "a b", "x1", "\t", "$ref", "const", ""])
_NUMBERS: Final = st.one_of(
    st.integers(-10, 10),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([2**53, 2**53 + 1, 2**63, 2**63 - 1, -(2**63), -(2**53) - 1, 10**18, 10**18 - 1]),
    st.floats(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(-5, 5, places=2).map(float),
)
_TEXTS: Final = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from(["a\x01b", "\x0b", "\x7f", "😀\u2028", '"\\/', "\b\f\n\r\t"]),
)
_VALUES: Final = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inside: st.one_of(st.lists(inside, max_size=3), st.dictionaries(_NAMES, inside, max_size=2)),
    max_leaves=4,
)
PATTERNS: Final = (
    "^a+$",
    "b",
    r"^\d{2,3}$",
    r"^\w+$",
    r"\s",
    r"^\S+$",
    r"^\W$",
    "^.$",
    "^[^a]$",
    "[a&&b]",
    r"^a\.b$",
    r"\v",
    r"^[\x00-\x1f]$",
    r"^[\x00-\x1fa]$",
    r"^\u00e9$",
    "^(a|b)*c$",
    "x{2}",
    "^{.*}$",
    r"^[\W\d]$",
    r"^[^\w]$",
    r"^[^\s]{2}$",
    "^$",
    r"^\D$",
    "(?i)^abc$",
    "^a$|^b$",
    '^[^"]*$',
    r"^[^\\]$",
    r'^[^"\\\n]+$',
    r"^\$\/\<$",
    r"[\]]",
    "^a\x01b$",
    r"^[^\S]$",
    r"^[\s\S]$",
    "^(?:[a-z]{2,5} ){1,2}end$",
    "[[:alpha:]]",
    "^[a--b]$",
)
FORMATS: Final = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)


def _keys(**keys: Schemas) -> Schemas:
    return st.fixed_dictionaries({}, optional=keys)


def _counts(most: int) -> Schemas:
    return st.integers(0, most)


def _types(*names: str) -> Schemas:
    return st.sampled_from(names)


def _composed(inside: Schemas) -> Schemas:
    bounds = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBERS)
    properties = st.dictionaries(_NAMES, inside, max_size=3)
    lists = st.lists(inside, min_size=1, max_size=3)
    return st.one_of(
        _keys(type=_types("integer", "number"), **bounds),
        _keys(type=_types("integer"), multipleOf=st.sampled_from([1, 2, 3, 7, 10, 2.0]), minimum=_NUMBERS),
        _keys(
            type=_types("string"),
            minLength=_counts(4),
            maxLength=_counts(6),
            pattern=st.sampled_from(PATTERNS),
        ),
        _keys(type=_types("string"), format=st.sampled_from(FORMATS), maxLength=st.integers(3, 40)),
        _keys(const=_VALUES),
        _keys(enum=st.lists(_VALUES, min_size=1, max_size=4), type=_types("string", "integer", "object")),
        _keys(
            type=_types("array"),
            items=inside,
            prefixItems=st.lists(inside, max_size=2),
            minItems=_counts(4),
            maxItems=_counts(4),
        ),
        _keys(type=_types("array"), items=inside, additionalItems=inside, minItems=_counts(3)),
        _keys(
            type=_types("object"),
            properties=properties,
            required=st.lists(_NAMES, max_size=2),
            additionalProperties=inside,
            minProperties=_counts(2),
            maxProperties=_counts(3),
        ),
        _keys(
            type=_types("object"),
            properties=properties,
            required=st.lists(_NAMES, max_size=1),
            patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inside, max_size=1),
            additionalProperties=inside,
        ),
        _keys(anyOf=lists, allOf=lists, type=_types("string", "integer", "object", "array")),
        _keys(
            oneOf=lists, minimum=_NUMBERS, properties=properties, additionalProperties=st.just(value=False)
        ),
        st.builds(
            lambda target, siblings: {"$ref": target, **siblings},
            _types("#/$defs/a", "#/$defs/b", "#"),
            _keys(minimum=_NUMBERS, maxLength=_counts(5), properties=properties),
        ),
    )


_PARTS: Final = st.recursive(
    st.booleans() | st.sampled_from([{"type": "integer"}, {"$ref": "#/$defs/a"}]), _composed, max_leaves=6
)


@st.composite
def drawn_schemas(draw: Any) -> dict[str, Any]:
    """Schemas of two drafts, with two definitions; their keys are in any order."""
    schema = draw(_composed(_PARTS))
    schema = {**schema, "$defs": {"a": draw(_PARTS), "b": draw(_PARTS)}}
    if draw(st.booleans()):
        schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    shuffled: dict[str, Any] = _shuffled(schema, Random(draw(st.integers(0, 2**32))))
    return shuffled


def _shuffled(schema: Any, random: Random) -> Any:
    if isinstance(schema, list):
        return [_shuffled(one, random) for one in schema]
    if not isinstance(schema, dict):
        return schema
    items = list(schema.items())
    random.shuffle(items)
    return {
        key: value if key in ("const", "enum", "required") else _shuffled(value, random)
        for key, value in items
    }


def changed(value: Any, random: Random) -> Any:
    """A value that differs in one place."""
    if value is None or isinstance(value, bool):
        return random.choice([True, False, None, 0, "x"])
    if isinstance(value, int):
        return random.choice([value + 1, value - 1, 2 * value, -value, value + 10 ** random.randint(0, 20)])
    if isinstance(value, float):
        near = [math.nextafter(value, math.inf), math.nextafter(value, -math.inf)]
        return random.choice([value + 1, -value, round(value, random.randint(0, 17)), *near])
    if isinstance(value, str):
        return _changed_text(value, random)
    if isinstance(value, list):
        return _changed_list(value, random)
    chosen = random.choice([*value, "a", "b", "zz"])
    if chosen in value and random.random() < 0.2:
        return {key: one for key, one in value.items() if key != chosen}
    return value | {chosen: changed(value.get(chosen), random)}


def _changed_list(items: list[Any], random: Random) -> list[Any]:
    if items and random.random() < 0.6:
        place = random.randrange(len(items))
        return [*items[:place], changed(items[place], random), *items[place + 1 :]]
    return random.choice([[*items, None], items + items[:1], items[:-1], items[1:], [*items, "a", 1]])


def _changed_text(text: str, random: Random) -> str:
    place = random.randint(0, len(text))
    extra = random.choice('a"\\\n\r\x0b\u2028\x85\ufeffé😀 1-._\uff16\x7fZ/')
    before, after = text[:place], text[place:]
    return random.choice([before + extra + after, before + after[1:], before + extra + after[1:], text * 2])
