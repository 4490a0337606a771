"""Preparation of a JSON schema: what llguidance would enforce inexactly is rewritten, or refused.

llguidance accepts some schemas of which it enforces less than they say, because it reads numbers into
doubles, drops characters, or defines formats and patterns in another way than validators do. A rewritten
schema allows only values that are valid by the original one; it may allow fewer of them.
"""

import json
import re
from typing import Final

from models.text.json_schema.characters import unspelled_in
from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.finite import check_finite
from models.text.json_schema.formats import FORMATS
from models.text.json_schema.nodes import Node, SchemaTree, plain_values
from models.text.json_schema.numbers import check_common_multiples, check_constants, replace_bounds
from models.text.json_schema.patterns import narrow_translation_of, translation_of

_COMPANIONS: Final = {
    "additionalItems": "items",
    "patternProperties": "properties",
    "additionalProperties": "properties",
}
"""Keywords whose meaning depends on another one. The compiler reads keywords in order, and compiles those
before an `anyOf`, `allOf`, `oneOf`, `$ref`, `const` or `enum` without those after it."""
_OLD_DRAFT: Final = re.compile(r"json-schema\.org/draft-0[0-3]/")


def prepared_schema(schema: Node) -> Node:
    """A copy of a schema for llguidance.

    Raises:
        UnsupportedSchemaError: a part of it cannot be enforced, or no finite value satisfies it.
    """
    try:
        copy: Node = json.loads(json.dumps(schema))
        tree = SchemaTree(copy)
        check_finite(tree)
        _check_drafts(tree)
        check_common_multiples(tree)
        for node in tree.nodes:
            _prepare(node)
    except RecursionError as error:
        raise UnsupportedSchemaError(
            "expected a schema of less depth, found one that is nested too deeply; flatten it"
        ) from error
    return copy


def _prepare(node: Node) -> None:
    """Rewrite one schema in place."""
    _check_literals(node)
    _check_items(node)
    _check_property_count(node)
    replace_bounds(node)
    _join_companions(node)
    _replace_property_patterns(node)
    _replace_texts(node)


def _check_drafts(tree: SchemaTree) -> None:
    """Refuse drafts of other keywords."""
    root = tree.nodes[0]
    for node in tree.nodes:
        draft = node.get("$schema")
        is_old = isinstance(draft, str) and _OLD_DRAFT.search(draft) is not None
        if is_old or (draft is not None and draft != root.get("$schema")):
            raise UnsupportedSchemaError(
                f"expected one $schema, of draft 4 or later, found {draft!r}; write the schema in one draft"
            )


def _check_literals(node: Node) -> None:
    """Refuse constants that cannot be spelled exactly."""
    given = [node["const"]] if "const" in node else []
    given += node["enum"] if isinstance(node.get("enum"), list) else []
    check_constants(given)
    for value in plain_values(given):
        if isinstance(value, str) and (found := unspelled_in(value)):
            raise UnsupportedSchemaError(
                f"expected constants of characters that guided JSON can contain, found {found} in {value!r}; "
                "leave the control character out"
            )


def _check_items(node: Node) -> None:
    """Refuse keywords for arrays of two drafts in one schema."""
    if "prefixItems" in node and ("additionalItems" in node or isinstance(node.get("items"), list)):
        raise UnsupportedSchemaError(
            "expected arrays as in one draft, found prefixItems beside additionalItems, or beside a list of "
            "items; use prefixItems and items"
        )


def _check_property_count(node: Node) -> None:
    """Refuse a `minProperties` that the compiler accepts but does not enforce.

    It would count a property that is repeated several times.
    """
    least, required = node.get("minProperties"), node.get("required")
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > known + 1:
        raise UnsupportedSchemaError(
            f"expected minProperties of at most {known + 1}, which is one more than what is required, found "
            f"{least}; name the properties in required"
        )


def _join_companions(node: Node) -> None:
    """Move keywords to the one on which their meaning depends."""
    for key, first in _COMPANIONS.items():
        if key in node and first in node:
            value = node.pop(key)
            items = list(node.items())
            place = [name for name, _ in items].index(first) + 1
            items.insert(place, (key, value))
            node.clear()
            node.update(items)


def _replace_property_patterns(node: Node) -> None:
    """Translate the patterns of property names.

    A name that matches for some validators only may have a value that satisfies the pattern's schema where
    other names may have any value, and must not occur where there are no others.
    """
    patterns = node.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    others = node.get("additionalProperties", True)
    found: Node = {}
    for pattern, schema in patterns.items():
        translation = translation_of(pattern)
        if others not in (True, False, {}) and translation.narrow != translation.wide:
            raise UnsupportedSchemaError(
                f"expected patternProperties without . \\d \\s \\w beside a schema of additionalProperties, "
                f"found {pattern!r}; write [0-9] for \\d, and the like"
            )
        found[translation.narrow if others is False else translation.wide] = schema
    node["patternProperties"] = found


def _replace_texts(node: Node) -> None:
    """Translate the pattern, and replace a known format by its patterns."""
    patterns, longest = [], None
    if isinstance(node.get("pattern"), str):
        patterns.append(narrow_translation_of(node.pop("pattern")))
    name = node.get("format")
    if isinstance(name, str) and name in FORMATS:
        del node["format"]
        patterns += [f"^(?:{pattern})$" for pattern in FORMATS[name].patterns]
        longest = FORMATS[name].max_length
    if not patterns:
        return
    node["pattern"] = patterns.pop(0)
    further: list[Node] = [{"pattern": pattern} for pattern in patterns]
    further += [{"maxLength": longest}] if longest is not None else []
    if further:
        of_type = {"type": "string"} if node.get("type") == "string" else {}
        node["allOf"] = [*node.get("allOf", []), *(of_type | one for one in further)]
