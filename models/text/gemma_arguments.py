r"""The syntax of arguments in Gemma's tool calls, as grammars. Pure.

    {city:<|"|>Ulm<|"|>,days:3,tags:[<|"|>a<|"|>],at:{lat:48.4}}

It is JSON with a mark instead of quotes around strings, and with names of properties that have none. Nothing
is escaped: a string ends at the next mark. The chat templates of Gemma 4 and FunctionGemma write it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from models.text.json_schema.errors import UnsupportedSchemaError

_SAID: Final = frozenset({"type", "description", "title", "default", "examples", "$defs", "definitions"})
"""The keywords that any schema may have."""
_SCALARS: Final = ("integer", "number", "boolean", "null")
_DEFINITIONS: Final = ("$defs", "definitions")
_MOST: Final = 1000
"""The most rules of one function: definitions that refer to each other may stand for any number of them."""


def any_arguments(quote: str, prefix: str) -> dict[str, str]:
    """The rules of an object with any properties: `<prefix>object`, and others with that prefix."""
    value = f"{prefix}string | {prefix}number | {prefix}word | {prefix}object | {prefix}array"
    return {
        f"{prefix}object": f'"{{" ({prefix}pair ("," {prefix}pair)*)? "}}"',
        f"{prefix}pair": f'{prefix}key ":" {prefix}value',
        f"{prefix}key": r"/[^<>\[\]{}:,\s]+/",
        f"{prefix}value": value,
        f"{prefix}array": f'"[" ({prefix}value ("," {prefix}value)*)? "]"',
        f"{prefix}number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        f"{prefix}word": '"true" | "false" | "null"',
        f"{prefix}string": f"{_text(quote)} {prefix}string_rest",
        f"{prefix}string_rest[suffix={_text(quote)}]": r"/(.|\n)*/",
    }


def arguments_rules(
    quote: str, prefix: str, schema: Mapping[str, Any], json_rule: Callable[[Mapping[str, Any]], str]
) -> dict[str, str]:
    """The rules of an object that matches a schema: `<prefix>object`, and others with that prefix.

    `json_rule(schema)` is the rule of JSON that matches a schema: numbers, truth values and null are JSON.

    Raises:
        UnsupportedSchemaError: it has a keyword that this syntax cannot follow.
    """
    rules = _Rules(quote, prefix, schema, json_rule)
    rules.add(f"{prefix}object", rules.of(schema))
    return rules.found


class _Rules:
    """The rules for one schema, named while it is read."""

    def __init__(
        self, quote: str, prefix: str, whole: Mapping[str, Any], json_rule: Callable[[Mapping[str, Any]], str]
    ) -> None:
        self.found: dict[str, str] = {}
        self._quote = quote
        self._prefix = prefix
        self._whole = whole
        self._json_rule = json_rule
        self._references: dict[str, str] = {}

    def add(self, name: str, rule: str) -> str:
        if len(self.found) >= _MOST:
            raise UnsupportedSchemaError(f"expected at most {_MOST} values, found more")
        self.found[name] = rule
        return name

    def of(self, schema: object) -> str:
        """The rule of a value, as an expression."""
        if not isinstance(schema, Mapping) or not schema or schema.keys() <= _SAID - {"type"}:
            return self._anything()
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        for several in ("anyOf", "oneOf"):
            if several in schema:
                _check(schema, several, _SAID | {several})
                return self._named(" | ".join(self.of(one) for one in schema[several]))
        if "enum" in schema or "const" in schema:
            _check(schema, "an enum", _SAID | {"enum", "const"})
            values = schema.get("enum", [schema.get("const")])
            return self._named(" | ".join(_text(self._written(value)) for value in values))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._named(" | ".join(self.of({**schema, "type": one}) for one in kind))
        if kind == "string":
            _check(schema, "a string", _SAID)
            return self._string()
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        if kind in _SCALARS:
            return self._named(self._json_rule(schema))
        raise UnsupportedSchemaError(
            f"expected a schema with a type, found {json.dumps(schema)[:200]}: its values cannot be enforced "
            "in this model's calls"
        )

    def _named(self, rule: str) -> str:
        return self.add(f"{self._prefix}value_{len(self.found)}", rule)

    def _anything(self) -> str:
        if f"{self._prefix}any_value" not in self.found:
            for name, rule in any_arguments(self._quote, f"{self._prefix}any_").items():
                self.add(name, rule)
        return f"{self._prefix}any_value"

    def _string(self) -> str:
        name = f"{self._prefix}text"
        if name not in self.found:
            self.add(name, f"{_text(self._quote)} {name}_rest")
            self.add(f"{name}_rest[suffix={_text(self._quote)}]", r"/(.|\n)*/")
        return name

    def _referred(self, reference: object) -> str:
        known = self._references.get(str(reference))
        if known is None:
            parts = str(reference).split("/")
            if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS:
                raise UnsupportedSchemaError(f"expected a $ref to #/$defs/..., found {reference!r:.80}")
            definition = self._whole.get(parts[1], {}).get(parts[2])
            if definition is None:
                raise UnsupportedSchemaError(f"$ref: there is no {reference!r:.80}")
            known = self._references[str(reference)] = f"{self._prefix}definition_{len(self._references)}"
            self.add(known, self.of(definition))
        return known

    def _array(self, schema: Mapping[str, Any]) -> str:
        _check(schema, "an array", _SAID | {"items", "minItems", "maxItems"})
        item = self.of(schema.get("items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return self._named('"[]"')
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        items = f"{item} {more}" if least else f"({item} {more})?"
        return self._named(f'"[" {items} "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        """An object with its properties in the order in which the templates write them, sorted."""
        _check(schema, "an object", _SAID | {"properties", "required", "additionalProperties"})
        required = set(schema.get("required", ()))
        properties = {**{key: {} for key in required}, **schema.get("properties", {})}
        if not properties and schema.get("additionalProperties", True) is not False:
            self._anything()
            return f"{self._prefix}any_object"
        pairs = [
            (self._named(f"{_text(f'{key}:')} {self.of(properties[key])}"), key in required)
            for key in sorted(properties, key=str.lower)
        ]
        first = self._first(pairs)
        return self._named(f'"{{" {first} "}}"' if first else '"{}"')

    def _first(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """The pairs from the first that is written on: what is optional may be left out, with its comma."""
        expression = ""
        for place in range(len(pairs) - 1, -1, -1):
            pair, is_required = pairs[place]
            more = " ".join(
                f'"," {other}' if need else f'("," {other})?' for other, need in pairs[place + 1 :]
            )
            here = f"{pair} {more}".strip()
            if is_required:
                expression = here
            else:
                expression = self._named(f"{here} | {expression}") if expression else f"({here})?"
        return expression

    def _written(self, value: object) -> str:
        """A value in this syntax."""
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, Mapping):
            pairs = (f"{key}:{self._written(value[key])}" for key in sorted(value, key=str.lower))
            return "{" + ",".join(pairs) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        return json.dumps(value)


def _check(schema: Mapping[str, Any], what: str, known: frozenset[str]) -> None:
    if unknown := sorted(schema.keys() - known):
        raise UnsupportedSchemaError(
            f"{what}: this model writes arguments in a syntax of its own, in which {', '.join(unknown)} "
            "cannot be enforced"
        )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
