"""The fields that the routes for texts have in common, and other servers' names for them."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import params_of
from gateway.openai.known_fields import NEUTRAL, check_fields
from gateway.openai.requests import with_options
from gateway.requests.parsed_request import DeliveryFields
from models import options
from models.options import Options
from shared.events import Params
from shared.validation_errors import described

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "add_special_tokens": (True,),
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": (),
}
"""Fields of other servers, with the values that change nothing."""
_TRUNCATE: Final[Mapping[object, Mapping[str, Any]]] = {
    True: {"truncate_prompt_tokens": -1},
    "END": {"truncate_prompt_tokens": -1, "truncation_side": "right"},
    "START": {"truncate_prompt_tokens": -1, "truncation_side": "left"},
}
"""The truncation that Jina's and Cohere's `truncate` asks for."""


class TextsRequest(DeliveryFields, frozen=True, kw_only=True):
    """The fields of all routes for texts. `user` is ignored.

    Attributes:
        truncate_prompt_tokens: as in `Params`; so are `truncation_side` and `options`.
    """

    model: Annotated[str, Meta(max_length=256)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    options: dict[str, Any] | None = None
    user: str | None = None

    @property
    def params(self) -> Params:
        """The parameters of the request's event.

        Raises:
            InvalidParamError: a value is out of its range.
        """
        self.check_delivery()
        return params_of(self)


def prepared(
    body: dict[str, Any],
    kind: type[TextsRequest],
    family: Options | None,
    *,
    aliases: Mapping[str, str],
    neutral: Mapping[str, tuple[object, ...]],
) -> dict[str, Any]:
    """Return a body with our names of all fields, checked; `family` declares the options of the model.

    `aliases` are other servers' names, with ours. `neutral` are further fields that are not supported, with
    the values that change nothing.

    Raises:
        InvalidParamError: a field is unknown, given under two names, or its value is not supported.
    """
    body = _renamed(_with_truncation(body), aliases)
    neutral = {**NEUTRAL, **_NEUTRAL, **neutral}
    body = with_options(body, {*kind.__struct_fields__, *neutral}, family)
    check_fields(body, kind.__struct_fields__, neutral, options.names(family))
    return {name: value for name, value in body.items() if name in kind.__struct_fields__}


def _renamed(body: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The body under our names."""
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in body.items():
        ours = aliases.get(name, name)
        if value is None and ours in found:
            continue
        if found.get(ours) is not None and found[ours] != value:
            raise InvalidParamError(name, f"{name}: expected it once, found it also as {given[ours]}")
        found[ours], given[ours] = value, name
    return found


def _with_truncation(body: dict[str, Any]) -> dict[str, Any]:
    """The body with `truncate` in our words; false is refused, because then a long text is an error."""
    found = body.get("truncate")
    if found is None:
        return body
    meant = _TRUNCATE.get(found) if isinstance(found, bool | str) else None
    if meant is None:
        if found in (False, "NONE"):
            raise NotSupportedError("truncate", found, "true, or truncate_prompt_tokens")
        raise InvalidParamError(
            "truncate", f'truncate: expected true, "START" or "END", found {described(found)}'
        )
    for name in meant:
        if body.get(name) is not None:
            raise InvalidParamError(name, f"{name}: expected none beside truncate, which sets it")
    return {**{name: value for name, value in body.items() if name != "truncate"}, **meant}
