"""What a bundle's header says of its records, put together for people. Pure; a replay reads the records."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from dalsegno.bundle.bundle_file import digest_of
from shared.events import (
    AnyEvent,
    MalformedEventError,
    NodeReady,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    WalkCompleted,
    decode,
)
from shared.log.port import StoredRecord
from shared.subject_rules import check_address
from shared.subjects import Subjects
from shared.tensors import Handle


def event_of(record: StoredRecord, subjects: Subjects | None = None) -> AnyEvent | None:
    """What a record says; None where the conductor cannot read it either."""
    try:
        if subjects is None:
            return decode(record.data)
        address = subjects.parse(record.subject)
        if address is None:
            return None
        event = decode(record.data, address.kind)
        check_address(address, event)
    except MalformedEventError:
        return None
    return event


def schemas(records: Iterable[StoredRecord], subjects: Subjects) -> list[str]:
    """The types of event in the records, with their versions."""
    events = (event_of(record, subjects) for record in records)
    return sorted({str(event.__struct_config__.tag) for event in events if event is not None})


def configs_in_force(
    records: Iterable[StoredRecord], subjects: Subjects, known: Mapping[str, Any]
) -> dict[str, Any]:
    """By digest, each configuration a request of these was admitted under; None where it is not known."""
    found: dict[str, Any] = {}
    for record in records:
        event = event_of(record, subjects)
        if isinstance(event, RequestAdmitted):
            found[event.pins.config] = known.get(event.pins.config)
    return found


def about(
    records: Iterable[StoredRecord], subjects: Subjects, requests: Iterable[str]
) -> list[dict[str, Any]]:
    """Of each request its model, seed, digests, placement, tensors and end."""
    found: dict[str, dict[str, Any]] = {one: {"request_id": one, "outcome": "open"} for one in requests}
    for record in records:
        address = subjects.parse(record.subject)
        told = found.get(str(address.request_id)) if address is not None else None
        event = event_of(record, subjects)
        if told is not None and event is not None:
            _fold(told, event)
    for told in found.values():
        told["tensors"] = list(told.pop("_tensors", {}).values())
    return list(found.values())


def _fold(told: dict[str, Any], event: AnyEvent) -> None:
    match event:
        case RequestSubmitted():
            told.setdefault("model", event.model)
            if event.forked_from is not None:
                told["forked_from"] = msgspec.to_builtins(event.forked_from)
        case RequestAdmitted():
            told |= {
                "family": event.family,
                "seed": event.seed,
                "pins": msgspec.to_builtins(event.pins),
                "limits": msgspec.to_builtins(event.limits),
                "placement": event.placement,
            }
            if event.walk_placement:
                told["walk_placement"] = event.walk_placement
        case RequestResumed():
            told["resumed"] = told.get("resumed", 0) + 1
        case NodeReady():
            told["attempts"] = max(told.get("attempts", 0), event.attempt)
            for walk in event.walks:
                _note(told, walk.inputs.values())
        case WalkCompleted():
            for result in event.results:
                _note(told, result.outputs.values())
        case RequestFinished():
            told["outcome"] = "finished"
        case RequestFailed():
            told["outcome"] = f"failed: {event.failure.code}"
        case RequestCancelled():
            told["outcome"] = "cancelled"
        case RequestRejected() if told["outcome"] == "open":
            told["outcome"] = f"rejected: {event.failure.code}"
        case _:
            pass


def _note(told: dict[str, Any], handles: Iterable[Handle]) -> None:
    """The tensors that decisions and reports name; of those that ride inline the digest is known."""
    tensors = told.setdefault("_tensors", {})
    for handle in handles:
        tensors[handle.key] = {
            "key": handle.key,
            "dtype": handle.dtype,
            "shape": list(handle.shape),
            "digest": None if handle.data is None else digest_of(handle.data),
        }
