"""Request bodies: JSON parsing, conversion to typed values, and their schemas for `/openapi.json`."""

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from gateway import errors
from gateway.errors import InvalidParamError
from gateway.http.content_types import check_json
from shared.closest_match import closest_match
from shared.errors import ClientError
from shared.events import Params
from shared.ids import is_token
from shared.validation_errors import described, validation_problem

_T = TypeVar("_T")
_Note: TypeAlias = Annotated[str, Meta(max_length=512)]
Metadata: TypeAlias = Annotated[dict[str, _Note], Meta(max_length=16)]
"""A client's own notes about an object, as OpenAI limits them."""
_BOM: Final = b"\xef\xbb\xbf"
"""The mark that editors and tools on Windows put before a text; JSON has none."""


class MalformedBodyError(ClientError):
    """The body is not JSON, or not an object."""

    code = "invalid_json"


async def read_object(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises:
        ContentTypeError: the body is not declared as JSON.
        MalformedBodyError: the body is something else.
    """
    check_json(request)
    found = parse_object(await request.body())
    chosen = found.get("request_id")
    if isinstance(chosen, str) and is_token(chosen):
        errors.note_chosen_id(request.scope, chosen)
    return found


def parse_object(data: bytes | str, what: str = "the body") -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        MalformedBodyError: `data` is something else.
    """
    found = parse_json(data, what)
    if not isinstance(found, dict):
        raise MalformedBodyError(f"{what}: expected a JSON object, found {described(found)}")
    return found


def parse_json(data: bytes | str, what: str) -> Any:
    """The JSON value in `data`; `what` names it in errors.

    Raises:
        MalformedBodyError: `data` is not JSON.
    """
    data = data.removeprefix(_BOM) if isinstance(data, bytes) else data.removeprefix("\ufeff")
    if not data:
        raise MalformedBodyError(f"{what} is empty: expected JSON")
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedBodyError(f"{what} is not JSON: {error}") from error


def params_of(request: msgspec.Struct, **changed: object) -> Params:
    """The parameters of a parsed body: its fields that `Params` has too, and those that are `changed`.

    None is absent.

    Raises:
        InvalidParamError: a value is of the wrong type or out of its range.
    """
    given = {
        name: value
        for name in Params.__struct_fields__
        if (value := changed[name] if name in changed else getattr(request, name, None)) is not None
    }
    return converted(given, Params)


def converted(value: object, kind: type[_T], where: str = "") -> _T:
    """`value` as an instance of `kind`; `where` is prefixed to the name of a wrong field.

    Raises:
        InvalidParamError: a field is missing, of the wrong type or out of its range.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise errors.of_validation_problem(validation_problem(error, value, kind), where) from error


def check_known(
    name: str,
    known: Iterable[str],
    where: str = "",
    *,
    hint: str | None = None,
    what: str = "unknown name",
) -> None:
    """Refuse a name that is not `known`; `what` describes it, and `where` is prefixed to it.

    Raises:
        InvalidParamError: the name is unknown. It suggests `hint`, or else the closest known name.
    """
    if name in known:
        return
    near = hint or closest_match(name, known, cutoff=0.5)
    advice = f"did you mean {near!r}?" if near else f"expected one of {', '.join(dict.fromkeys(known))}"
    raise InvalidParamError(
        f"{where}{name}"[:200], f"{where}{name[:80]}: {what}; {advice}", code="unknown_parameter"
    )


def check_names(where: str, found: object, known: Collection[str]) -> None:
    """Refuse the fields of an object that are not `known`. Null is absent; values are not checked.

    Raises:
        InvalidParamError: there is one.
    """
    if isinstance(found, dict) and not found.keys() <= set(known):
        for name, value in found.items():
            if value is not None:
                check_known(name, known, f"{where}.", what="unknown field")


def string_in(where: str, found: object, name: str) -> str:
    """The string in a field of an object at `where`.

    Raises:
        InvalidParamError: there is none.
    """
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, str):
        raise wrong_value(f"{where}.{name}", "a string", value)
    return value


def wrong_value(where: str, expected: str, found: object) -> InvalidParamError:
    """The error for a value that is not what was expected."""
    return InvalidParamError(where, f"{where}: expected {expected}, found {described(found)}")


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a body for `/openapi.json`: FastAPI does not parse the body itself."""
    [schema], parts = msgspec.json.schema_components([kind], ref_template="{name}")
    content = {"application/json": {"schema": _whole(schema, parts)}}
    return {"requestBody": {"required": True, "content": content}}


def _whole(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema with its references replaced: `/openapi.json` keeps referenced schemas elsewhere."""
    match schema:
        case {"$ref": name}:
            return _whole(parts[name], parts)
        case dict():
            return {key: _whole(value, parts) for key, value in schema.items()}
        case list():
            return [_whole(value, parts) for value in schema]
        case _:
            return schema
