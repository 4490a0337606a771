"""The guide of an answer under the names that other servers have for it.

    ours     guide: {"json_schema" | "json_object" | "regex" | "choice" | "grammar": ...}
    vLLM     structured_outputs: {"json" | "json_object" | "regex" | "choice" | "grammar": ...}
             guided_json, guided_regex, guided_choice, guided_grammar
    SGLang   json_schema, regex, ebnf

A JSON schema may be written as text, as SGLang has it. Grammars are those of llguidance (Lark), which vLLM
takes, too; grammars in EBNF are refused.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_known
from shared.events import Guide
from shared.validation_errors import described

_FIELDS: Final[Mapping[str, str]] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
}
"""The fields of a body, and the kind of a guide that each is."""
_STRUCTURED: Final = "structured_outputs"
_KINDS: Final[Mapping[str, str]] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""The same of the names in `structured_outputs`."""
_EBNF: Final = "::="
NAMES: Final = (*_FIELDS, _STRUCTURED)


def with_guide(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with the guide under our name; the body itself if it has none of another name.

    Raises:
        InvalidParamError: a guide is wrong, not supported, or there are several.
    """
    found = [(name, body[name]) for name in NAMES if body.get(name) is not None]
    if not found:
        return body
    given = [name for name, _ in found] + [name for name in ("guide",) if body.get(name) is not None]
    if len(given) > 1:
        raise InvalidParamError(given[1], f"{given[1]}: expected one guide, found also {given[0]}")
    [(name, value)] = found
    guide = _structured(value) if name == _STRUCTURED else _guide(name, _FIELDS[name], value)
    return {key: one for key, one in body.items() if key != name} | {"guide": guide}


def _structured(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidParamError(_STRUCTURED, f"{_STRUCTURED}: expected an object, found {described(value)}")
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    for name in given:
        check_known(name, _KINDS, f"{_STRUCTURED}.", what="not supported")
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InvalidParamError(
            _STRUCTURED, f"{_STRUCTURED}: expected one of {', '.join(_KINDS)}, found {found}"
        )
    [(name, one)] = given.items()
    return _guide(f"{_STRUCTURED}.{name}", _KINDS[name], one)


def _guide(where: str, kind: str, value: Any) -> dict[str, Any]:
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise InvalidParamError(
                where, f"{where}: expected a JSON schema, found text that is no JSON: {error}"
            ) from error
    if kind == "grammar" and isinstance(value, str) and _EBNF in value:
        raise NotSupportedError(where, "a grammar in EBNF", "one in llguidance's dialect of Lark")
    guide = {kind: value}
    try:
        msgspec.convert(guide, Guide)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidParamError(where, f"{where}: {error}") from error
    return guide
