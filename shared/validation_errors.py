"""Messages for a value that does not fit its type: the place, what was expected, and what was found.

    stop[0]: expected a string of at least 1 character, found an empty string

msgspec finds the problem and its place. The message is made from the type and the value there, so that the
API and the configuration report errors in one style, independent of the library.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import inspect

_SHOWN_CHARS: Final = 80
_AT: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_STEP: Final = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_FIELD: Final = re.compile(r"^Object (missing required|contains unknown) field `([^`]*)`$")


@dataclass(frozen=True, slots=True)
class ValidationProblem:
    """One problem of a value.

    Attributes:
        place: `messages[0].content`; empty for the whole value.
        problem: `expected an integer >= 1, found 0`.
        is_missing: a required field is missing.
    """

    place: str
    problem: str
    is_missing: bool = False

    @property
    def message(self) -> str:
        return f"{self.place}: {self.problem}" if self.place else self.problem


def validation_problem(error: msgspec.ValidationError, value: object, kind: Any) -> ValidationProblem:
    """Return the problem that `error` reports about `value`, which was converted to `kind`."""
    text = str(error)
    at = _AT.search(text)
    place, text = (at[1], text[: at.start()]) if at else ("", text)
    field = _FIELD.match(text)
    if field:
        place = f"{place}.{field[2]}".lstrip(".")
        if field[1] == "contains unknown":
            return ValidationProblem(place, "unknown name")
        expected = " or ".join(_nouns(_kind_at(place, inspect.type_info(kind)), None)) or "a value"
        return ValidationProblem(place, f"expected {expected}, found nothing", is_missing=True)
    if "[...]" in place:
        place = _with_key(place, value, inspect.type_info(kind))
    if "[...]" in place or " in `" in place:  # in a map, at an unknown key
        return ValidationProblem(place, f"{text[:1].lower()}{text[1:]}")
    found = _value_at(place, value)
    nouns = list(_nouns(_kind_at(place, inspect.type_info(kind)), found))
    if not nouns or text[:1].islower():  # an error of the type's own check, with a complete message
        name, colon, problem = text.partition(": ")
        if colon and name.isidentifier():  # about one field
            return ValidationProblem(f"{place}.{name}".lstrip("."), problem)
        return ValidationProblem(place, text)
    return ValidationProblem(place, f"expected {' or '.join(nouns)}, found {described(found)}")


def described(value: object) -> str:
    """Return a value for a message: short ones as they are, long ones by their type and size."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case "":
            return "an empty string"
        case str() if len(value) <= _SHOWN_CHARS:
            return repr(value)
        case str():
            return f"a string of {len(value)} characters"
        case int() if value.bit_length() > 64:  # it may have a million digits
            return "an integer beyond 64 bits"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"an array of {_counted(len(value), 'item')}" if value else "an empty array"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def _steps(place: str) -> Iterator[str | int]:
    for index, name in _STEP.findall(place):
        yield int(index) if index else name


def _value_at(place: str, value: Any) -> Any:
    for step in _steps(place):
        value = value[step]
    return value


def _with_key(place: str, value: Any, kind: inspect.Type) -> str:
    """Return `place` with the key of the wrong item, which msgspec omits; unchanged if the key is unknown.

    It takes one pass over the items, because a client may send a million.
    """
    before, _, behind = place.partition("[...]")
    map_ = _kind_at(before, kind)
    of_map = next((one for one in _members(map_) if isinstance(one, inspect.DictType)), None)
    if behind or of_map is None:
        return place
    for key, item in _value_at(before, value).items():
        if not any(_fits(member, item) for member in _members(of_map.value_type)):
            is_a_step = isinstance(key, str) and key != "" and not {*key} & {*".[]`"}
            return f"{before}.{key}".lstrip(".") if is_a_step else place
    return place


def _fits(kind: inspect.Type, found: object) -> bool:
    """Return whether `found` fits a scalar type and its bounds; True for other types."""
    match kind:
        case inspect.IntType():
            return isinstance(found, int) and not isinstance(found, bool) and not _bound(kind, found)
        case inspect.FloatType():
            return isinstance(found, int | float) and not isinstance(found, bool) and not _bound(kind, found)
        case inspect.StrType():
            return isinstance(found, str) and not _length(kind, found, str, "character")
        case inspect.BoolType():
            return isinstance(found, bool)
        case inspect.NoneType():
            return found is None
        case _:
            return True


def _kind_at(place: str, kind: inspect.Type) -> inspect.Type:
    for step in _steps(place):
        inner = (_inside(member, step) for member in _members(kind))
        kind = next((one for one in inner if one is not None), inspect.AnyType())
    return kind


def _inside(kind: inspect.Type, step: str | int) -> inspect.Type | None:
    match kind:
        case inspect.StructType():
            return next((field.type for field in kind.fields if field.encode_name == step), None)
        case inspect.ListType() if isinstance(step, int):
            return kind.item_type
        case inspect.DictType():
            return kind.value_type
        case _:
            pass
    return None


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _nouns(kind: inspect.Type, found: object) -> Iterator[str]:
    """Yield the expected types, with the bounds that `found` violates; nothing if any value is allowed."""
    for member in _members(kind):
        match member:
            case inspect.IntType():
                yield f"an integer{_bound(member, found)}"
            case inspect.FloatType():
                yield f"a number{_bound(member, found)}"
            case inspect.StrType(pattern=str(pattern)) if isinstance(found, str):
                yield f"a string that matches {pattern}"
            case inspect.StrType():
                yield f"a string{_length(member, found, str, 'character')}"
            case inspect.ListType():
                yield f"an array{_length(member, found, list, 'item')}"
            case inspect.BoolType():
                yield "true or false"
            case inspect.LiteralType():
                yield f"one of {', '.join(map(str, member.values))}"
            case inspect.StructType() | inspect.DictType():
                yield "an object"
            case _:
                pass


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _bound(kind: inspect.IntType | inspect.FloatType, found: object) -> str:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return ""
    if kind.ge is not None and found < kind.ge:
        return f" >= {_number(kind.ge)}"
    if kind.gt is not None and found <= kind.gt:
        return f" > {_number(kind.gt)}"
    if kind.le is not None and found > kind.le:
        return f" <= {_number(kind.le)}"
    if kind.multiple_of is not None and found % kind.multiple_of:
        return f" that is a multiple of {kind.multiple_of} (the nearest is {_nearest(kind, found):g})"
    return ""


def _nearest(kind: inspect.IntType | inspect.FloatType, found: float) -> float:
    """The multiple within the bounds that is next to `found`."""
    step = kind.multiple_of or 1
    multiple = round(found / step)
    if kind.ge is not None:
        multiple = max(multiple, math.ceil(kind.ge / step))
    if kind.le is not None:
        multiple = min(multiple, math.floor(kind.le / step))
    return multiple * step


def _length(kind: inspect.StrType | inspect.ListType, found: object, type_: type, unit: str) -> str:
    if not isinstance(found, type_):
        return ""
    length = len(found)  # type: ignore[arg-type]
    if kind.min_length is not None and length < kind.min_length:
        return f" of at least {_counted(kind.min_length, unit)}"
    if kind.max_length is not None and length > kind.max_length:
        return f" of at most {_counted(kind.max_length, unit)}"
    return ""


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
