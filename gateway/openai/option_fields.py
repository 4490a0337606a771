"""Fields of OpenAI's that become options of the model's family (`models.options`).

A family that lacks an option cannot be asked for it, and the family's declaration decides which values it
takes. Errors name the client's field.
"""

from collections.abc import Mapping
from typing import Any

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.served_model import ServedModel
from models import options
from shared.errors import ClientError


def merged_options(
    served: ServedModel,
    given: Mapping[str, Any] | None,
    fields: Mapping[str, Mapping[str, Any]],
    values: object,
) -> dict[str, Any]:
    """Return the options that a request has given, with those that its fields become.

    Args:
        served: the model.
        given: the request's own options, checked before.
        fields: by field, the options that it becomes; none if it is not given.
        values: has the fields' values as attributes, for errors.

    Raises:
        InvalidParamError: the family lacks an option or refuses its value, or it was given twice.
    """
    found = dict(given or {})
    for field, becomes in fields.items():
        for name, value in becomes.items():
            _check(served, field, name, value, found, getattr(values, field))
            found[name] = value
    return found


def option_fields(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By option, the field of another name that it comes from; `fields` as of `merged_options`."""
    return {name: field for field, becomes in fields.items() for name in becomes if name != field}


def _check(
    served: ServedModel, field: str, name: str, value: object, found: Mapping[str, Any], asked: object
) -> None:
    if name not in options.names(served.options):
        raise NotSupportedError(field, asked, "null")
    if name in found and found[name] != value:
        raise InvalidParamError(
            field, f"{field}: expected it once, found it also as the option {name} with another value"
        )
    try:
        options.check(served.options, {name: value}, "")
    except ClientError as error:
        problem = error.message.removeprefix(f"{name}: ")
        place = field if field == name else f"{field} ({name})"
        raise InvalidParamError(field, f"{place}: {problem}") from error
