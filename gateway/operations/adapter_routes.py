"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's routes for adapters at run time.

A route answers when its event is in the log. From that position on, every conductor and gateway knows the
adapter; workers load it with the first request that names it.
"""

import asyncio
import re
import secrets
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta

from gateway.http.bodies import body_schema, check_known, converted, read_object
from gateway.requests.service import Gateway
from models.checkpoints.adapters import adapter_at
from shared.adapters import NAME_PATTERN, addressed
from shared.errors import ClientError, ModelNotFoundError
from shared.events import AdapterLoaded, AdapterUnloaded, encode
from shared.log.port import WrongLastSequenceError
from shared.validation_errors import described

_LOAD: Final = "/load_lora_adapter"
_UNLOAD: Final = "/unload_lora_adapter"


class AdaptersFixedError(ClientError):
    """The deployment takes no adapters at run time."""

    code = "adapters_fixed"
    status = 403


class AdapterConflictError(ClientError):
    """The name is taken by another adapter, or by one of the configuration."""

    code = "adapter_conflict"
    status = 409
    param = "lora_name"


class InvalidAdapterRequestError(ClientError):
    """The body does not name an adapter."""

    code = "invalid_value"


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request to load an adapter.

    Attributes:
        lora_name: 1 to 64 letters, digits, `_` and `-`.
        lora_path: a folder as peft writes it, absolute, on the machines of gateway and workers.
        load_inplace: replace an adapter of that name; requests in progress keep theirs.
    """

    lora_name: Annotated[str, Meta(max_length=64)]
    lora_path: Annotated[str, Meta(max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request to unload an adapter; requests in progress keep theirs."""

    lora_name: Annotated[str, Meta(max_length=64)]


_R = TypeVar("_R", LoadRequest, UnloadRequest)


def adapter_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(prefix="/v1", tags=["adapters"])
    served = gateway.served.adapters

    @router.post(_LOAD, summary="Load a LoRA adapter", openapi_extra=body_schema(LoadRequest))
    async def load(request: Request) -> dict[str, Any]:
        body = _parsed(await read_object(request), LoadRequest)
        _check_name(gateway, body.lora_name)
        if not re.match(NAME_PATTERN, body.lora_name):
            raise InvalidAdapterRequestError(
                f"lora_name: expected 1 to 64 letters, digits, '_' and '-', found {described(body.lora_name)}"
            )
        folder = Path(body.lora_path)
        if not folder.is_absolute():
            raise InvalidAdapterRequestError(
                f"lora_path: expected an absolute path, found {described(body.lora_path)}"
            )
        adapter = await asyncio.to_thread(adapter_at, body.lora_name, folder)
        known = served.by_name.get(adapter.name)
        if known is not None and known.digest != adapter.digest and not body.load_inplace:
            raise AdapterConflictError(
                f"the adapter {adapter.name!r} is loaded with other weights ({known.digest[:12]}, not "
                f"{adapter.digest[:12]}): unload it first, or send load_inplace"
            )
        event = AdapterLoaded(id=_id(gateway), writer=gateway.origin, adapter=adapter)
        await _publish(gateway, event)
        return {
            "id": addressed(gateway.served.name, adapter.name),
            "object": "adapter",
            "digest": adapter.digest,
            "root": adapter.folder,
        }

    @router.post(_UNLOAD, summary="Unload a LoRA adapter", openapi_extra=body_schema(UnloadRequest))
    async def unload(request: Request) -> dict[str, Any]:
        body = _parsed(await read_object(request), UnloadRequest)
        _check_name(gateway, body.lora_name)
        model = addressed(gateway.served.name, body.lora_name)
        if body.lora_name not in served.by_name:
            raise ModelNotFoundError(model, gateway.served.name)
        event = AdapterUnloaded(id=_id(gateway), writer=gateway.origin, name=body.lora_name)
        await _publish(gateway, event)
        return {"id": model, "object": "adapter", "deleted": True}

    return router


def _parsed(fields: dict[str, Any], kind: type[_R]) -> _R:
    for name in fields:
        check_known(name, kind.__struct_fields__)
    return converted(fields, kind)


def _check_name(gateway: Gateway, name: str) -> None:
    """Refuse any change if the configuration allows none, and changes of what it names."""
    served = gateway.served.adapters
    if not served.takes_others:
        raise AdaptersFixedError(
            "adapters are not loaded or unloaded at run time here: expected adapters_at_runtime: true in the "
            "configuration"
        )
    if name in served.configured:
        raise AdapterConflictError(
            f"the adapter {name!r} is one of the configuration (the key adapters): change it there"
        )


async def _publish(gateway: Gateway, event: AdapterLoaded | AdapterUnloaded) -> None:
    """Store an event, and apply it here before the log brings it back.

    Raises:
        AdapterConflictError: another gateway changes the adapter at this moment.
    """
    log, name = gateway.log, event.adapter_name
    subject = gateway.subjects.adapter(name)
    last = await log.last(subject)
    known = last.seq if last is not None else 0
    try:
        if known > gateway.served.adapters.changed_at(name):
            raise WrongLastSequenceError(f"{subject} has changed")
        seq = await log.publish(subject, encode(event), expected_last_seq=known)
    except WrongLastSequenceError as error:
        raise AdapterConflictError(f"the adapter {name!r} is being changed elsewhere: try again") from error
    gateway.served.adapters.fold(event, seq)


def _id(gateway: Gateway) -> str:
    return f"{gateway.origin}.adapter.{secrets.token_hex(8)}"
