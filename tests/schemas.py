"""Random JSON schemas that guides support; each permits short answers, so that generation ends."""

from random import Random
from typing import Any

_NAMES = ("a", "b c", "naïve", 'q"\\', "", "n1", "😀")
_WORDS = ("yes", "no", "", "é\n\t", 'say "x"', "\\", "line\u2028")


def random_schema(random: Random, depth: int = 3) -> Any:
    """A schema of limited depth."""
    kinds = [_boolean, _integer, _number, _string, _enum, _const]
    if depth > 0:
        kinds += [_array, _object, _any_of, _tuple, _one_of, _ref]
    return random.choice(kinds)(random, depth)


def _boolean(random: Random, depth: int) -> Any:
    return {"type": random.choice(["boolean", "null", ["boolean", "null"]])}


def _integer(random: Random, depth: int) -> Any:
    low = random.randint(-2000, 2000)
    bounds = random.choice(
        [
            {"minimum": low, "maximum": low + random.randint(0, 300)},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + random.randint(2, 50)},
            {"minimum": 0, "maximum": 99, "multipleOf": random.randint(2, 9)},
        ]
    )
    return {"type": "integer", **bounds}


def _number(random: Random, depth: int) -> Any:
    low = random.randint(-50, 50) / 4
    return {"type": "number", "minimum": low, "maximum": low + random.randint(1, 40) / 4}


def _string(random: Random, depth: int) -> Any:
    least = random.randint(0, 3)
    return {
        "type": "string",
        **random.choice(
            [
                {"minLength": least, "maxLength": least + random.randint(0, 6)},
                {
                    "pattern": random.choice(
                        ["^[a-c]{1,4}$", "^(ab|cd)?x[0-9]{2}$", '^[^a-z"]{0,3}$', "^é?ü$"]
                    )
                },
                {"format": random.choice(["date", "time", "ipv4"])},
            ]
        ),
    }


def _enum(random: Random, depth: int) -> Any:
    values: list[Any] = [*_WORDS, 1, -2.5, None, True, {"a": [1, "é"]}, [None]]
    return {"enum": random.sample(values, random.randint(1, 4))}


def _const(random: Random, depth: int) -> Any:
    return {"const": random.choice([*_WORDS, 0, 1.25, False, [1, {"b": None}], {"x y": "z"}])}


def _array(random: Random, depth: int) -> Any:
    least = random.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(random, depth - 1),
        "minItems": least,
        "maxItems": least + random.randint(0, 2),
    }


def _tuple(random: Random, depth: int) -> Any:
    first = [random_schema(random, depth - 1) for _ in range(random.randint(1, 2))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def _object(random: Random, depth: int) -> Any:
    names = random.sample(_NAMES, random.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.6],
        "additionalProperties": random.choice([False, False, False, {"type": "null"}]),
    }


def _any_of(random: Random, depth: int) -> Any:
    return {"anyOf": [random_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}


def _one_of(random: Random, depth: int) -> Any:
    def tagged(tag: str) -> Any:
        return {
            "type": "object",
            "properties": {"kind": {"const": tag}, "value": random_schema(random, depth - 1)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    return {"oneOf": [tagged(tag) for tag in ("cat", "dog")]}


def _ref(random: Random, depth: int) -> Any:
    # Definitions are the whole schema's: only the outermost may have them.
    if depth < 3:
        return _boolean(random, depth)
    return {
        "$defs": {"part": random_schema(random, depth - 2)},
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/part"}, "two": {"$ref": "#/$defs/part"}},
        "required": ["one"],
        "additionalProperties": False,
    }
