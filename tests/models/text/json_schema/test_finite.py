"""Schemas with and without finite values."""

from typing import Any

import pytest

from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.finite import check_finite
from models.text.json_schema.nodes import SchemaTree

SELF: dict[str, Any] = {"$ref": "#"}


def node(**keys: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": {"$ref": "#"}}, **keys}


INFINITE: dict[str, dict[str, Any]] = {
    "a required property": node(required=["next"]),
    "a loop of two definitions": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/b"}], "minItems": 1},
            "b": node(required=["next"]),
        },
    },
    "items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "required here, described there": {"allOf": [{"type": "object", "required": ["next"]}, node()]},
    "all branches": {
        "anyOf": [node(required=["next"]), {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]
    },
    "a branch and its sibling": {**node(), "anyOf": [{"required": ["next"]}]},
    "any name": {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
    "a required name by a pattern": {
        "type": "object",
        "required": ["a"],
        "patternProperties": {"^a": {"$ref": "#"}},
        "additionalProperties": False,
    },
    "by an anchor": {"$anchor": "top", "type": "array", "items": {"$ref": "#top"}, "minItems": 1},
    "by an id": {
        "$id": "http://x.org/s",
        "type": "array",
        "items": {"$ref": "http://x.org/s"},
        "minItems": 1,
    },
    "by another id": {
        "$ref": "inner",
        "$id": "http://x.org/s",
        "$defs": {"a": {"$id": "inner", "type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    },
    "outside of definitions": {"parts": {"a": node(required=["next"])}, "$ref": "#/parts/a"}
    | {"type": "object"},
}
INFINITE["outside of definitions"]["parts"]["a"]["properties"]["next"] = {"$ref": "#/parts/a"}

FINITE: dict[str, dict[str, Any]] = {
    "an optional property": node(),
    "an alternative": node(required=["next"]) | {"properties": {"next": {"anyOf": [SELF, {"type": "null"}]}}},
    "an empty list": {"type": "array", "items": {"$ref": "#"}},
    "a type without parts": {"type": ["object", "null"], "required": ["next"], "properties": {"next": SELF}},
    "a constant": {"const": {"next": {}}, **node(required=["next"])},
    "a tree": {
        "$ref": "#/$defs/t",
        "$defs": {
            "t": {
                "type": "object",
                "required": ["v", "kids"],
                "properties": {
                    "v": {"type": "integer"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}},
                },
            }
        },
    },
    "another name": {"type": "object", "minProperties": 1, "properties": {"next": {"$ref": "#"}}},
    "a reference that is not found": {"$ref": "#/$defs/none"},
}


@pytest.mark.parametrize("schema", INFINITE.values(), ids=INFINITE)
def test_references_that_never_end_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSchemaError, match="a schema with finite values"):
        check_finite(SchemaTree(schema))


@pytest.mark.parametrize("schema", FINITE.values(), ids=FINITE)
def test_recursion_that_may_end_is_accepted(schema: dict[str, Any]) -> None:
    check_finite(SchemaTree(schema))


def test_a_contradiction_is_left_to_the_compiler() -> None:
    check_finite(SchemaTree({"type": "object", "required": ["a"], "properties": {"a": False}}))


def combinations() -> dict[str, Any]:
    branches = [{"properties": {f"p{n}": {"type": "array"}}, "type": "object"} for n in range(20)]
    return {
        "allOf": [{"anyOf": [dict(branch) for branch in branches]} for _ in range(6)],
        "required": ["q"],
    }


def test_too_many_combinations_are_refused() -> None:
    with pytest.raises(UnsupportedSchemaError, match="followed in time"):
        check_finite(SchemaTree({**combinations(), "properties": {"again": {"$ref": "#"}}}))


def test_combinations_without_references_need_no_search() -> None:
    check_finite(SchemaTree(combinations()))
