"""A guided text is valid by its schema, or the schema is refused by name."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.text.guides import GuideCompiler, InvalidGuideError
from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.prepare import prepared_schema
from tests.models.text.json_schema.drawn_schemas import FORMATS, PATTERNS, changed, drawn_schemas
from tests.models.text.json_schema.guided_texts import (
    accepts,
    byte_compiler,
    compiled,
    fault_of,
    is_multiple,
    random_text,
)


@pytest.fixture(scope="module")
def compiler() -> GuideCompiler:
    return byte_compiler()


def faults(
    compiler: GuideCompiler, schema: dict[str, Any], random: Random, *, texts: int
) -> list[tuple[str, str]]:
    """Texts that the schema's guide allows, although they are not valid, with the reasons."""
    guide = compiled(compiler, schema)
    found = []
    for _ in range(texts):
        text = random_text(guide, random)
        if text is None:
            continue
        near = [
            json.dumps(changed(json.loads(text), random), ensure_ascii=False, allow_nan=True)
            for _ in range(4)
        ]
        for one in (text, *(other for other in near if accepts(guide, other))):
            fault = fault_of(schema, one)
            if fault:
                found.append((one, fault))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible")
@given(schema=drawn_schemas(), seed=st.integers(0, 2**32))
@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
def test_guided_texts_are_valid_by_their_schemas(
    compiler: GuideCompiler, schema: dict[str, Any], seed: int
) -> None:
    try:
        found = faults(compiler, schema, Random(seed), texts=4)
    except InvalidGuideError:
        return

    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_format_pass_its_checker(compiler: GuideCompiler, name: str) -> None:
    schema = {"type": "string", "format": name}

    assert faults(compiler, schema, Random(1), texts=60) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible")  # Python's: another meaning of `[[` and `&&` is planned
@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_of_a_pattern_match_it(compiler: GuideCompiler, pattern: str) -> None:
    try:
        found = faults(compiler, {"type": "string", "pattern": pattern}, Random(1), texts=30)
    except InvalidGuideError:
        return

    assert found == []


@pytest.mark.parametrize("multiple", ["0.01", "0.25", "3", "2.5"])
def test_multiples_are_judged_as_decimals(compiler: GuideCompiler, multiple: str) -> None:
    guide = compiled(compiler, {"type": "number", "multipleOf": float(multiple), "minimum": -50})
    random = Random(1)

    texts = [text for _ in range(50) if (text := random_text(guide, random)) is not None]

    assert texts
    assert [text for text in texts if not is_multiple(text, multiple)] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"minimum": 2**53 + 1, "type": "integer"},
            ["9007199254740994"],
            ["9007199254740992", "9007199254740993"],
        ),
        ({"maximum": 2**63 - 1, "type": "integer"}, ["9223372036854774784", "-5"], ["9223372036854775808"]),
        ({"exclusiveMaximum": 2**60, "type": "integer"}, ["1152921504606846848"], ["1152921504606846976"]),
        ({"exclusiveMaximum": 1, "minimum": 0}, ["0.99999999999999"], ["0.99999999999999999"]),
        ({"exclusiveMinimum": 0, "type": "number"}, ["0.001"], ["0"]),
        ({"maximum": 1e300, "type": "number"}, ["12.5"], []),
        ({"minimum": 5, "allOf": [{}], "exclusiveMinimum": True, "type": "integer"}, ["6"], ["5"]),
        ({"items": [{}], "anyOf": [{}], "additionalItems": False, "type": "array"}, ["[1]"], ["[1,2]"]),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"'],
            ['"2023-02-29"', '"0000-01-01"', '"1900-02-29"'],
        ),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"', '"24:00:00Z"']),
        (
            {"type": "string", "format": "date-time"},
            ['"2020-01-01T00:00:59.5+01:00"'],
            ['"2020-01-01T00:00:60Z"'],
        ),
        (
            {"type": "string", "format": "hostname"},
            ['"a.b-c.example"'],
            [f'"{"a." * 126}example"', '"-a"', '"1.2"'],
        ),
        ({"type": "string", "format": "email"}, ['"a.b@example.com"'], [f'"{"a" * 65}@b.c"', '"a@-b"']),
        ({"type": "string", "pattern": '^[^"]$'}, ['"a"', '"\\n"'], ['"\\""']),
        ({"type": "string", "pattern": r"^\s$"}, ['" "', '"\\t"'], ['"\x85"', '"\ufeff"']),
        ({"type": "string", "pattern": r"^\W$"}, ['"-"'], ['"é"', '"a"']),
        (
            {"patternProperties": {r"^\w$": {"type": "null"}}, "type": "object"},
            ['{"é":null}'],
            ['{"é":1}', '{"a":1}'],
        ),
    ],
)
def test_what_a_prepared_schema_allows(
    compiler: GuideCompiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    guide = compiled(compiler, schema)

    assert [text for text in good if not accepts(guide, text)] == []
    assert [text for text in bad if accepts(guide, text)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"const": "a\x01b"}, r"found U\+0001 in 'a\\x01b'; leave"),
        ({"enum": [{"a": ["\x0b"]}]}, r"found U\+000B"),
        ({"pattern": r"\v"}, r"pattern .*: .* found U\+000B; describe"),
        ({"pattern": r"[\x00\x01]"}, "a class of control characters"),
        ({"const": 2**53 + 1}, "at most 15 digits, or integers up to .*, found 9007199254740993; use fewer"),
        ({"enum": [0.1234567890123456]}, "found 0.1234567890123456"),
        ({"minimum": 10**18}, r"bounds below 10\*\*18, found minimum 1000000000000000000; use"),
        (
            {"minimum": 0.1234567890123456, "maximum": 0.1234567890123456},
            "no text satisfies it: no number of at",
        ),
        ({"multipleOf": 0}, "positive multipleOf .* found 0"),
        (
            {"allOf": [{"multipleOf": 100_000}, {"multipleOf": 65_536}]},
            "product below .* 65536, 100000; write",
        ),
        ({"minimum": "1"}, "expected a number as minimum, found '1'"),
        ({"prefixItems": [{}], "additionalItems": False}, "arrays as in one draft"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 4 or later"),
        ({"items": {"$schema": "http://json-schema.org/draft-07/schema#"}}, "one \\$schema"),
        (
            {"patternProperties": {r"^\d$": {}}, "additionalProperties": {"type": "null"}},
            r"write \[0-9\] for",
        ),
        ({"components": {"a": {"const": "\x01"}}, "$ref": "#/components/a"}, r"U\+0001"),
    ],
)
def test_what_cannot_be_enforced_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=reason):
        prepared_schema(schema)


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}

    with pytest.raises(UnsupportedSchemaError, match="nested too deeply"):
        prepared_schema(schema)


def test_unreferenced_values_of_unknown_keywords_are_no_schemas() -> None:
    prepared_schema({"x-notes": {"const": "\x01", "minimum": "none"}})


def test_the_given_schema_is_not_changed() -> None:
    schema = {"format": "date", "allOf": [{"exclusiveMinimum": 1}]}

    prepared_schema(schema)

    assert schema == {"format": "date", "allOf": [{"exclusiveMinimum": 1}]}
