"""A request as the routes submit it, and how every route makes one from its parsed body."""

import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request

from configs.deployment import GatewaySettings
from gateway import request_limits
from gateway.client_key import key_name
from gateway.requests.request_ids import request_id_of
from shared.events import Inputs, Params, Priority
from shared.ids import RequestId


class DeliveryFields(msgspec.Struct, frozen=True, kw_only=True):
    """Our fields of every route's body: they say how a request is treated, and not what it asks.

    Attributes:
        linger_s: the disconnect grace: the request continues for so long after its client has left.
        priority: requests with a higher one are served first.
    """

    request_id: str | None = None
    timeout_s: float | None = None
    linger_s: float | None = None
    priority: Priority | None = None

    def check_delivery(self) -> None:
        """Check the ranges of `timeout_s` and `linger_s`.

        Raises:
            InvalidParamError: a value is out of its range.
        """
        request_limits.check_timeout(self.timeout_s)
        request_limits.check_disconnect_grace(self.linger_s)


class ModelRequest(DeliveryFields, frozen=True, kw_only=True):
    """The fields that all of OpenAI's routes have in common."""

    model: Annotated[str, Meta(max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The treatment of a request that this gateway itself makes: a line of a batch (`gateway.batches`).

    Attributes:
        request_id: its id, under which it is made again after a crash, to attach to the first one.
        priority: the most that it may have.
        timeout_s: the time limit, in the place of the gateway's.
    """

    request_id: str
    priority: int
    timeout_s: float


DELIVERY: Final = "delivery"
"""The entry of `scope["state"]` with the `Delivery` of such a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One request, ready to be submitted.

    Attributes:
        id_is_chosen: the client chose the id, so it may ask for the answer again.
        created_s: the time of the request, in seconds since 1970.
        is_resumed: the client has a part of the answer: the request must exist, and is not started.
        parent: the id of the HTTP request, if that has several choices; `parts` is their number, and `part`
            the index of this one (`gateway.requests.choices`).
        timeout_s: the time limit; None is unlimited.
        disconnect_grace_s: the time for which the request continues without a client.
        priority: requests with a higher one are served first; among equals, those of the `tenant` with the
            fewest.
        api_fields: as in the event.
    """

    request_id: RequestId
    id_is_chosen: bool
    model: str
    inputs: Inputs
    params: Params
    created_s: int
    is_resumed: bool = False
    trace: str | None = None
    parent: RequestId | None = None
    parts: int = 1
    part: int = 0
    timeout_s: float | None = None
    disconnect_grace_s: float = 0.0
    priority: int = 0
    tenant: str | None = None
    api_fields: dict[str, Any] = field(default_factory=dict)


def parsed_request(
    http: Request, fields: DeliveryFields, settings: GatewaySettings, *, id_prefix: str, **content: Any
) -> ParsedRequest:
    """The request of an HTTP request; `content` is its `model`, `inputs` and `params`.

    Raises:
        ClientError: the chosen id is not valid.
    """
    parsed = ParsedRequest(
        request_id=request_id_of(fields.request_id, id_prefix),
        id_is_chosen=fields.request_id is not None,
        created_s=int(time.time()),
        trace=http.headers.get("traceparent"),
        timeout_s=request_limits.time_limit_s(fields.timeout_s, settings),
        disconnect_grace_s=fields.linger_s or 0.0,
        priority=fields.priority or 0,
        tenant=key_name(http.scope),
        **content,
    )
    given: Delivery | None = http.scope["state"].get(DELIVERY) if "state" in http.scope else None
    if given is None:
        return parsed
    return replace(
        parsed,
        request_id=RequestId(given.request_id),
        id_is_chosen=True,
        timeout_s=min(fields.timeout_s or given.timeout_s, given.timeout_s),
        priority=given.priority if fields.priority is None else min(fields.priority, given.priority),
    )
