"""The summary of a bundle's records in its header. Pure; a replay reads the records themselves."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from dalsegno.bundle.bundle_file import digest_of
from shared.events import (
    AnyEvent,
    MalformedEventError,
    Media,
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
from shared.subject_rules import check_event_subject
from shared.subjects import Subjects
from shared.tensors import Handle


def event_of(record: StoredRecord, subjects: Subjects | None = None) -> AnyEvent | None:
    """Decode a record; None if the conductor cannot read it either."""
    try:
        if subjects is None:
            return decode(record.data)
        address = subjects.parse(record.subject)
        if address is None:
            return None
        event = decode(record.data, address.kind)
        check_event_subject(address, event)
    except MalformedEventError:
        return None
    return event


def schemas(records: Iterable[StoredRecord], subjects: Subjects) -> list[str]:
    """The event types in the records, with their versions."""
    events = (event_of(record, subjects) for record in records)
    return sorted({str(event.__struct_config__.tag) for event in events if event is not None})


def configs_in_force(
    records: Iterable[StoredRecord], subjects: Subjects, known: Mapping[str, Any]
) -> dict[str, Any]:
    """By digest, each configuration under which a request was admitted; None if it is unknown."""
    found: dict[str, Any] = {}
    for record in records:
        event = event_of(record, subjects)
        if isinstance(event, RequestAdmitted):
            found[event.pins.config] = known.get(event.pins.config)
    return found


def about(
    records: Iterable[StoredRecord], subjects: Subjects, requests: Iterable[str]
) -> list[dict[str, Any]]:
    """Of each request: model, seed, digests, placement, tensors and end."""
    found: dict[str, dict[str, Any]] = {one: {"request_id": one, "outcome": "open"} for one in requests}
    for record in records:
        address = subjects.parse(record.subject)
        summary = found.get(str(address.request_id)) if address is not None else None
        event = event_of(record, subjects)
        if summary is not None and event is not None:
            _fold(summary, event)
    for summary in found.values():
        summary["tensors"] = list(summary.pop("_tensors", {}).values())
    return list(found.values())


def _fold(summary: dict[str, Any], event: AnyEvent) -> None:
    match event:
        case RequestSubmitted():
            summary.setdefault("model", event.model)
            if event.inputs.files:
                summary.setdefault("media", [_about_medium(one) for one in event.inputs.files])
            if event.forked_from is not None:
                summary["forked_from"] = msgspec.to_builtins(event.forked_from)
        case RequestAdmitted():
            summary |= {
                "family": event.family,
                "seed": event.seed,
                "pins": msgspec.to_builtins(event.pins),
                "limits": msgspec.to_builtins(event.limits),
                "placement": event.placement,
            }
            if event.walk_placement:
                summary["walk_placement"] = event.walk_placement
            if event.weights:
                summary["weights"] = event.weights
        case RequestResumed():
            summary["resumed"] = summary.get("resumed", 0) + 1
            if event.weights not in ({}, summary.get("weights", {})):
                summary.setdefault("resumed_weights", []).append(event.weights)
        case NodeReady():
            summary["attempts"] = max(summary.get("attempts", 0), event.attempt)
            for walk in event.walks:
                _note(summary, walk.inputs.values())
        case WalkCompleted():
            for result in event.results:
                _note(summary, result.outputs.values())
        case RequestFinished():
            summary["outcome"] = "finished"
        case RequestFailed():
            summary["outcome"] = f"failed: {event.failure.code}"
        case RequestCancelled():
            summary["outcome"] = "cancelled"
        case RequestRejected() if summary["outcome"] == "open":
            summary["outcome"] = f"rejected: {event.failure.code}"
        case _:
            pass


def _about_medium(medium: Media) -> dict[str, Any]:
    return {"modality": medium.modality, "digest": medium.digest, "size": medium.size}


def _note(summary: dict[str, Any], handles: Iterable[Handle]) -> None:
    """Add the tensors named by decisions and reports; inline ones with their digest."""
    tensors = summary.setdefault("_tensors", {})
    for handle in handles:
        tensors[handle.key] = {
            "key": handle.key,
            "dtype": handle.dtype,
            "shape": list(handle.shape),
            "digest": None if handle.data is None else digest_of(handle.data),
        }
