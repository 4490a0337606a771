"""Numbers in schemas, so that llguidance enforces them exactly.

It reads a number into a double, but exactly only if that has few digits, and computes with bounds as 64-bit
integers. Clients read answers into doubles, too, so 0.99999999999999999 is 1 for them. So a bound that is not
certain to be enforced becomes the next stricter one that is, and a constant is refused.
"""

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Final, NamedTuple

from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.nodes import Node, SchemaTree, plain_values

_MEETING: Final = frozenset({"anyOf", "oneOf", "$ref"})
_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_DIGITS: Final = 15
"""Every number with so many decimal digits can be read into a double and written again without a change."""
_PLACES: Final = 22
"""Up to 10**22, powers of ten are exact in doubles."""
_QUANTUM: Final = Decimal(1).scaleb(-_PLACES)
_EXACT: Final = Decimal(2**53)
"""Doubles represent all integers up to this one."""
_LARGEST: Final = Decimal(2**63 - 1024)
"""The largest double that is a 64-bit integer."""
_LARGEST_LEAST: Final = Decimal(10**18 - 1)
"""The compiler writes 9 for each digit of a lower bound, which must be a 64-bit integer, too."""
_UP: Final = Context(prec=_DIGITS, rounding=ROUND_CEILING)


def check_constants(values: Iterable[Any]) -> None:
    """Refuse numbers in `const` and `enum` that would become other numbers.

    Raises:
        UnsupportedSchemaError: a number has too many digits.
    """
    for value in plain_values(values):
        if _is_number(value) and not _is_exact(Decimal(repr(value))):
            raise UnsupportedSchemaError(
                f"expected constants of at most {_DIGITS} digits, or integers up to 2**53, found {value}; "
                "use fewer digits, or a string"
            )


def check_common_multiples(tree: SchemaTree) -> None:
    """Refuse values of `multipleOf` whose common multiple the compiler cannot compute, in 32 bits.

    It computes one where schemas meet: in `allOf`, or beside `anyOf`, `oneOf` and `$ref`.

    Raises:
        UnsupportedSchemaError: they meet, and are too large together.
    """
    if not any("allOf" in node or (_MEETING.intersection(node) and len(node) > 1) for node in tree.nodes):
        return
    values = {Decimal(repr(node["multipleOf"])) for node in tree.nodes if _is_number(node.get("multipleOf"))}
    places = max((-min(0, _exponent(value)) for value in values), default=0)
    scaled = [int(value.scaleb(places)) for value in values]
    if len(values) > 1 and math.prod(scaled) >= 2**32:
        raise UnsupportedSchemaError(
            f"expected values of multipleOf with a product below 2**32 in schemas that meet, found "
            f"{', '.join(map(str, sorted(values)))}; write their common multiple in one place"
        )


def replace_bounds(node: Node) -> None:
    """Replace the bounds of a schema by inclusive ones that are enforced exactly, and are at least as strict.

    Raises:
        UnsupportedSchemaError: a bound is no number, too large, or leaves nothing.
    """
    _check_multiple(node)
    given: Node = {key: node[key] for key in _BOUNDS if key in node}
    if not given:
        return
    bounds = _Bounds.of(given)
    least, most = _lower(bounds.minimum, bounds.above), _upper(bounds.maximum, bounds.below)
    described = ", ".join(f"{key} {value}" for key, value in given.items())
    if (least is not None and least > _LARGEST_LEAST) or (most is not None and most < -_LARGEST_LEAST):
        raise UnsupportedSchemaError(f"expected bounds below 10**18, found {described}; use a smaller one")
    if least is not None and most is not None and least > most:
        if bounds.contradict_exactly():
            return  # the compiler says so
        raise UnsupportedSchemaError(
            f"no text satisfies it: no number of at most {_DIGITS} digits is within {described}; resolve the "
            "contradiction"
        )
    _replace(node, {"minimum": least, "maximum": most}, given)


class _Bounds(NamedTuple):
    """The bounds of a schema; `above` and `below` are exclusive."""

    minimum: Decimal | None
    above: Decimal | None
    maximum: Decimal | None
    below: Decimal | None

    @classmethod
    def of(cls, given: Node) -> "_Bounds":
        return cls(
            *_side(given, "minimum", "exclusiveMinimum"),
            *_side(given, "maximum", "exclusiveMaximum"),
        )

    def contradict_exactly(self) -> bool:
        """True if no number is within the given bounds, and the compiler reads them exactly."""
        least = [bound for bound in (self.minimum, self.above) if bound is not None]
        most = [bound for bound in (self.maximum, self.below) if bound is not None]
        return all(map(_is_exact, least + most)) and max(least) >= min(most)


def _side(given: Node, inclusive: str, exclusive: str) -> tuple[Decimal | None, Decimal | None]:
    """The inclusive and the exclusive bound of one side; in draft 4 a boolean makes the first exclusive."""
    plain, beyond = given.get(inclusive), given.get(exclusive)
    if isinstance(beyond, bool):
        plain, beyond = (None, plain) if beyond else (plain, None)
    for key, value in ((inclusive, plain), (exclusive, beyond)):
        if value is not None and not _is_number(value):
            raise UnsupportedSchemaError(f"expected a number as {key}, found {value!r}; correct it")
    return _decimal(plain), _decimal(beyond)


def _replace(node: Node, bounds: dict[str, Decimal | None], given: Node) -> None:
    """Write the bounds in the place of the given ones; the order of a schema's keys is kept."""
    items = [(key, value) for key, value in node.items() if key not in given]
    first = min(list(node).index(key) for key in given)
    items[first:first] = [(key, _plain(value)) for key, value in bounds.items() if value is not None]
    node.clear()
    node.update(items)


# ---- the next enforceable number ---------------------------------------------------------------------


def _lower(minimum: Decimal | None, above: Decimal | None) -> Decimal | None:
    """The strictest of an inclusive and an exclusive lower bound, as an inclusive one."""
    found = [] if minimum is None else [_at_least(minimum)]
    found += [] if above is None else [_next_above(above)]
    return max(found, default=None)


def _upper(maximum: Decimal | None, below: Decimal | None) -> Decimal | None:
    return _negated(_lower(_negated(maximum), _negated(below)))


def _negated(number: Decimal | None) -> Decimal | None:
    return None if number is None else number.copy_negate()


def _at_least(bound: Decimal) -> Decimal:
    """The smallest enforceable number from a bound on."""
    if bound < -_LARGEST:
        return -_LARGEST
    if _is_exact(bound):
        return bound
    if bound == bound.to_integral_value():
        return _double_from(bound)
    rounded = _UP.plus(bound)
    return rounded.quantize(_QUANTUM, ROUND_CEILING) if abs(bound) < 1 else rounded


def _next_above(bound: Decimal) -> Decimal:
    """The smallest enforceable number above a bound, apart from some that differ in the last digits."""
    if bound == 0:
        return _QUANTUM
    if abs(bound) > _LARGEST:
        return max(bound, -_LARGEST)
    if abs(bound) >= _EXACT:
        return _at_least(Decimal(math.nextafter(float(bound), math.inf)))
    if abs(bound) >= 10**_DIGITS:
        return _at_least(bound + 1)
    rounded = _at_least(bound)
    last_digit = Decimal(1).scaleb(rounded.adjusted() - _DIGITS + 1)
    return rounded if rounded > bound else rounded + max(_QUANTUM, last_digit)


def _double_from(bound: Decimal) -> Decimal:
    """The smallest double from an integer on."""
    nearest = Decimal(float(bound))
    return nearest if nearest >= bound else Decimal(math.nextafter(float(bound), math.inf))


def _is_exact(value: Decimal) -> bool:
    """True if the compiler reads exactly this number."""
    if value == value.to_integral_value() and abs(value) <= _LARGEST:
        return Decimal(float(value)) == value
    return len(value.normalize().as_tuple().digits) <= _DIGITS and abs(_exponent(value)) <= _PLACES


def _exponent(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int), "JSON has no infinity"
    return exponent


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _decimal(value: Any) -> Decimal | None:
    return None if value is None else Decimal(repr(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_multiple(node: Node) -> None:
    multiple = node.get("multipleOf", 1)
    if not _is_number(multiple) or multiple <= 0 or not _is_exact(Decimal(repr(multiple))):
        raise UnsupportedSchemaError(
            f"expected a positive multipleOf of at most {_DIGITS} digits, found {multiple!r}; correct it"
        )
