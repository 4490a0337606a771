"""Options: a family's own request parameters, declared by `ModelGraph.options`.

The declaration is a struct with fields such as `steps: Annotated[int, Meta(ge=1, le=50)] = 10`. Every field
has a default, and a description in the section `Attributes` of the docstring. Bounds are `msgspec.Meta`.
A class variable `OTHER_NAMES` maps the names that other servers use to those of the fields. Fields, names and
descriptions are inherited.

A request carries options as plain values in `Params.options`. Gateway and conductor validate them with
`check`; a plan reads them with `PlanRequest.options_as`. Pure: no torch, no I/O.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from shared.closest_match import did_you_mean
from shared.docstrings import meanings_of
from shared.errors import BugError, ClientError
from shared.events import Params
from shared.validation_errors import validation_problem

Options = type[msgspec.Struct]

RESERVED: Final = frozenset({*Params.__struct_fields__, "max_output_tokens", "max_new_tokens"})
"""Names that options cannot have: the parameters of all families, and their other spellings."""


class OptionsError(BugError):
    """A family declares options that cannot be offered."""

    code = "invalid_options"


class InvalidOptionError(ClientError):
    """An option of a request is unknown or has a wrong value; `param` is its name."""

    code = "invalid_value"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def check_declaration(kind: Options) -> None:
    """Check a declaration of options.

    Raises:
        OptionsError: an option has no default or no description, or the name of another parameter.
    """
    meanings = _meanings(kind)
    for field in msgspec.structs.fields(kind):
        where = f"{kind.__name__}.{field.encode_name}"
        if field.required:
            raise OptionsError(f"{where}: expected a default, found none; a request may leave options out")
        if field.name not in meanings:
            raise OptionsError(f"{where}: expected a description under 'Attributes:' in the docstring")
        if field.encode_name in RESERVED:
            raise OptionsError(f"{where}: expected another name, found that of a parameter of all models")
    known = names(kind)
    for other, own in other_names(kind).items():
        if own not in known or other in known or other in RESERVED:
            raise OptionsError(
                f"{kind.__name__}.OTHER_NAMES[{other!r}]: expected a new name for one of {', '.join(known)}, "
                f"found {own!r}"
            )


def names(kind: Options | None) -> tuple[str, ...]:
    """Return the names of the options; none without a declaration."""
    return () if kind is None else tuple(field.encode_name for field in msgspec.structs.fields(kind))


def other_names(kind: Options | None) -> Mapping[str, str]:
    """Return the names that are accepted in addition, with those of the options that they mean."""
    if kind is None:
        return {}
    lineage = reversed(kind.__mro__)
    return {other: own for base in lineage for other, own in vars(base).get("OTHER_NAMES", {}).items()}


def _meanings(kind: Options) -> dict[str, str]:
    """The descriptions of the options, those of inherited ones included."""
    return {name: text for base in reversed(kind.__mro__) for name, text in meanings_of(base).items()}


def renamed(kind: Options | None, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return options under their own names; those that are none are left as they are.

    Raises:
        InvalidOptionError: an option is given under two names, with different values.
    """
    others = other_names(kind)
    found = {name: value for name, value in given.items() if name not in others}
    for name, value in given.items():
        own = others.get(name)
        if own is None:
            continue
        if found.setdefault(own, value) != value:
            raise InvalidOptionError(
                f"{where}{name}", f"{where}{name}: expected it once, found {where}{own} with another value"
            )
    return found


def check(kind: Options | None, given: Mapping[str, Any], where: str = "options.") -> None:
    """Check the options of a request; `where` is prefixed to their names in errors.

    Raises:
        InvalidOptionError: an option is unknown, or its value is wrong.
    """
    known = names(kind)
    for name in given:
        if name not in known:
            raise InvalidOptionError(f"{where}{name}", f"{where}{name}: {_advice(name, known)}")
    if kind is None or not given:
        return
    try:
        msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem = validation_problem(error, given, kind)
        place = f"{where}{problem.place}" if problem.place else where.rstrip(".")
        raise InvalidOptionError(place, f"{place}: {problem.problem}") from error


def _advice(name: str, known: Collection[str]) -> str:
    if not known:
        return "unknown option; this model has none"
    listed = f"expected one of {', '.join(known)}"
    return f"unknown option; {did_you_mean(name, known, otherwise=listed)}"


def schema(kind: Options | None) -> dict[str, Any]:
    """Return the JSON schema of the options, with defaults and descriptions."""
    if kind is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    (top,), definitions = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
    top = definitions.pop(top["$ref"].rpartition("/")[2])
    meanings = _meanings(kind)
    described = {
        field.encode_name: {**top["properties"][field.encode_name], "description": meanings[field.name]}
        for field in msgspec.structs.fields(kind)
    }
    found = {"type": "object", "properties": described, "additionalProperties": False}
    return {**found, "$defs": definitions} if definitions else found
