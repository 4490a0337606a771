"""Numbers in schemas, so that llguidance enforces them exactly.

It reads a number into a double, but exactly only if that has few digits, and computes with bounds as 64-bit
integers. Clients read answers into doubles, too, so 0.99999999999999999 is 1 for them. So a bound that is not
certain to be enforced becomes the next stricter one that is, and a constant is refused.
"""

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final

from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.nodes import Node

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
_DOWN: Final = Context(prec=_DIGITS, rounding=ROUND_FLOOR)


def check_constants(values: Iterable[Any]) -> None:
    """Refuse numbers in `const` and `enum` that would become other numbers.

    Raises:
        UnsupportedSchemaError: a number has too many digits.
    """
    inside = list(values)
    while inside:
        value = inside.pop()
        if isinstance(value, list):
            inside += value
        elif isinstance(value, dict):
            inside += value.values()
        elif _is_number(value) and not _is_exact(Decimal(repr(value))):
            raise UnsupportedSchemaError(
                f"expected constants of at most {_DIGITS} digits, or integers up to 2**53, found {value}; "
                "use fewer digits, or a string"
            )


def replace_bounds(node: Node) -> None:
    """Replace the bounds of a schema by inclusive ones that are enforced exactly, and are at least as strict.

    Raises:
        UnsupportedSchemaError: a bound is too large.
    """
    given = {
        key: node[key]
        for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        if key in node
    }
    _check_multiple(node)
    if not given:
        return
    least = _strictest(given, "minimum", "exclusiveMinimum", max, _at_least, _above)
    most = _strictest(given, "maximum", "exclusiveMaximum", min, _at_most, _below)
    described = ", ".join(f"{key} {value}" for key, value in given.items())
    if (least is not None and least > _LARGEST_LEAST) or (most is not None and most < -_LARGEST_LEAST):
        raise UnsupportedSchemaError(f"expected bounds below 10**18, found {described}; use a smaller one")
    if least is not None and most is not None and least > most:
        if _is_contradiction(given):
            return  # the compiler says so
        raise UnsupportedSchemaError(
            f"no text satisfies it: no number of at most {_DIGITS} digits is within {described}; resolve the "
            "contradiction"
        )
    _replace(node, {"minimum": least, "maximum": most}, given)


def _is_contradiction(given: Node) -> bool:
    """True if the bounds contradict each other as they are given, and the compiler reads them exactly."""
    if not all(_is_number(bound) and _is_exact(Decimal(repr(bound))) for bound in given.values()):
        return False
    least = max(value for key, value in given.items() if key.lower().endswith("minimum"))
    most = min(value for key, value in given.items() if key.lower().endswith("maximum"))
    return bool(least >= most)


def _replace(node: Node, bounds: dict[str, Decimal | None], given: Node) -> None:
    """Write the bounds in the place of the given ones; the order of a schema's keys is kept."""
    items = [(key, value) for key, value in node.items() if key not in given]
    first = min(list(node).index(key) for key in given)
    items[first:first] = [(key, _plain(value)) for key, value in bounds.items() if value is not None]
    node.clear()
    node.update(items)


def _strictest(
    given: Node, inclusive: str, exclusive: str, choose: Any, at: Any, beyond: Any
) -> Decimal | None:
    """The strictest of an inclusive and an exclusive bound, as an inclusive one."""
    plain, outside = given.get(inclusive), given.get(exclusive)
    found = []
    if outside is True and _is_number(plain):  # as in draft 4
        return beyond(Decimal(repr(plain)))
    if _is_number(plain):
        found.append(at(Decimal(repr(plain))))
    if _is_number(outside):
        found.append(beyond(Decimal(repr(outside))))
    for key in (inclusive, exclusive):
        if (
            key in given
            and not _is_number(given[key])
            and not (key == exclusive and isinstance(given[key], bool))
        ):
            raise UnsupportedSchemaError(f"expected a number as {key}, found {given[key]!r}; correct it")
    return choose(found, default=None)


def _at_least(bound: Decimal) -> Decimal:
    """The smallest enforceable number from a bound on."""
    if bound < -_LARGEST:
        return -_LARGEST
    if _is_exact(bound):
        return bound
    if bound == bound.to_integral_value():
        return _double_from(bound)
    return _UP.plus(bound).quantize(_QUANTUM, ROUND_CEILING) if abs(bound) < 1 else _UP.plus(bound)


def _above(bound: Decimal) -> Decimal:
    """The smallest enforceable number above a bound, apart from some that differ in the last digits."""
    if bound == 0:
        return _QUANTUM
    if abs(bound) > _LARGEST:
        return max(bound, -_LARGEST)
    if abs(bound) >= 10**_DIGITS:
        return (
            _at_least(bound + 1)
            if abs(bound) < _EXACT
            else _at_least(Decimal(math.nextafter(float(bound), math.inf)))
        )
    rounded = _at_least(bound)
    return (
        rounded
        if rounded > bound
        else rounded + max(_QUANTUM, Decimal(1).scaleb(rounded.adjusted() - _DIGITS + 1))
    )


def _at_most(bound: Decimal) -> Decimal:
    return -_at_least(-bound)


def _below(bound: Decimal) -> Decimal:
    return -_above(-bound)


def _double_from(bound: Decimal) -> Decimal:
    """The smallest double from an integer on."""
    nearest = Decimal(float(bound))
    return nearest if nearest >= bound else Decimal(math.nextafter(float(bound), math.inf))


def _is_exact(value: Decimal) -> bool:
    """True if the compiler reads exactly this number."""
    if value == value.to_integral_value() and abs(value) <= _LARGEST:
        return Decimal(float(value)) == value
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int), "JSON has no infinity"
    return len(value.normalize().as_tuple().digits) <= _DIGITS and abs(exponent) <= _PLACES


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_multiple(node: Node) -> None:
    multiple = node.get("multipleOf", 1)
    if not _is_number(multiple) or multiple <= 0 or not _is_exact(Decimal(repr(multiple))):
        raise UnsupportedSchemaError(
            f"expected a positive multipleOf of at most {_DIGITS} digits, found {multiple!r}; correct it"
        )
