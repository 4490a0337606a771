"""Request bodies: what JSON is, the parameters all routes share, and what `/openapi.json` says of a body."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec
from starlette.requests import Request

from gateway import errors
from gateway.errors import InvalidParamError
from shared.errors import ClientError
from shared.events import Params
from shared.validation_errors import described, misfit


class MalformedBodyError(ClientError):
    """The body is not JSON, or not an object."""

    code = "invalid_json"


async def read_object(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object, whatever its content type says.

    Raises:
        MalformedBodyError: it is something else.
    """
    return parse_object(await request.body())


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
    """What `data` says in JSON.

    Raises:
        MalformedBodyError: it is none.
    """
    if not data:
        raise MalformedBodyError(f"{what} is empty: expected JSON")
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedBodyError(f"{what} is not JSON: {error}") from error


def params_of(given: Mapping[str, object], where: str = "") -> Params:
    """Parameters from plain values; None is absent. `where` stands before the name of one that is wrong.

    Raises:
        InvalidParamError: a value is of the wrong type or out of its range.
    """
    present = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(present, Params)
    except msgspec.ValidationError as error:
        raise errors.of_misfit(misfit(error, present, Params), where) from error


def check_known(
    name: str,
    known: Iterable[str],
    where: str = "",
    *,
    hint: str | None = None,
    what: str = "unknown name",
) -> None:
    """Refuse a name that is none of those `known`, as `what` it is; `where` stands before it.

    Raises:
        InvalidParamError: it is none; `hint` is what is meant, if that is known better.
    """
    if name in known:
        return
    near = [hint] if hint else get_close_matches(name, list(known), n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    raise InvalidParamError(
        f"{where}{name}"[:200], f"{where}{name[:80]}: {what}; {advice}", code="unknown_parameter"
    )


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A body's schema, for `/openapi.json`: the body itself is parsed by us."""
    [schema], parts = msgspec.json.schema_components([kind], ref_template="{name}")
    content = {"application/json": {"schema": _whole(schema, parts)}}
    return {"requestBody": {"required": True, "content": content}}


def _whole(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema with its parts where they are referred to: `/openapi.json` has its references elsewhere."""
    match schema:
        case {"$ref": name}:
            return _whole(parts[name], parts)
        case dict():
            return {key: _whole(value, parts) for key, value in schema.items()}
        case list():
            return [_whole(value, parts) for value in schema]
        case _:
            return schema
