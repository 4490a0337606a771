"""The levels `control` and `schedule` over one source: a log or a bundle. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dalsegno.gate import admission, control, scheduling
from dalsegno.gate.deployments import Deployments
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.gate.results import Examined
from dalsegno.gate.scheduling import Redecided
from dalsegno.replay import recorded_request, verdicts
from dalsegno.replay.recorded_request import History
from models import registry
from shared.log.port import StoredRecord
from shared.subjects import Subjects

PARTLY: Final = (
    "bundles hold no other request: the order of admissions, the choice of ranks and full queues are taken "
    "as recorded"
)


_OF_CLIENTS: Final = frozenset({"request", "control"})
"""Kinds of subjects on which clients write what they like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The records of one source.

    Attributes:
        records: in the order of the log.
        history: what a bundle has; None for a log.
        configs: the stored configurations by digest.
        damaged: the requests that may lack records, with the reason.
        begins: the reason why the records do not begin with the log; empty if they do.
        tampered: the reason why the records are not those that were written; empty if nothing is known.
    """

    name: str
    subjects: Subjects
    records: Sequence[StoredRecord]
    history: History | None = None
    configs: dict[str, Any] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    begins: str = ""
    tampered: str = ""


def control_of(recording: Recording, requests: Collection[str], unended: Collection[str] = ()) -> Examined:
    """Decide requests again by `react`; those in `unended` have not ended in the records."""
    if recording.history is None:
        return control.of_log(
            recording.records,
            recording.subjects,
            requests,
            recording.name,
            recording.damaged,
            unended,
        )
    results = recorded_request.control(recording.history)
    return control.of_results(
        [one for one in results if one.verdict.request_id in requests], recording.name, unended
    )


def schedule_of(recording: Recording, requests: Collection[str], deployments: Deployments) -> Examined:
    """Decide again by `schedule`."""
    found = Examined(level="schedule", source=recording.name)
    subjects = recording.subjects
    if recording.history is not None and recording.history.is_redacted:
        found.whole = "a redacted bundle has other requests than its log"
        return found
    if recording.begins:
        found.whole = recording.begins
        return found
    records = [one for one in recording.records if for_conductor(one.subject, subjects)]
    recorded = index(records, subjects, registry.graph)
    for record in recorded.unreadable:
        address = subjects.parse(record.subject)
        if address is None or address.kind in _OF_CLIENTS:
            continue
        if (tag := verdicts.unknown_tag(record.data)) is not None:
            found.whole = f"record {record.seq} is a {tag}, which this version does not know"
            return found
    if recording.history is None:
        epochs = deployments.of_epochs(recorded)
        if epochs and all(isinstance(one, str) for one in epochs.values()):
            found.whole = str(next(iter(epochs.values())))
            return found
        again = scheduling.decide_again(records, recorded, epochs, subjects=subjects, graph_of=registry.graph)
    else:
        again = admission.decide_again(
            records, recorded, deployments.of, subjects=subjects, graph_of=registry.graph
        )
        found.notes.append(PARTLY)
    _add(found, again, requests)
    return found


def _add(found: Examined, again: Redecided, requests: Collection[str]) -> None:
    """Add the decisions about the chosen requests."""
    found.decided = {name: count for name, count in again.decided.items() if name in requests}
    found.cannot = {name: why for name, why in again.skipped.items() if name in requests}
    found.differences = [
        msgspec.structs.replace(one, source=found.source)
        for one in again.differences
        if one.request_id in requests or one.event == scheduling.SCHEDULER
    ]
    if again.unproven:
        one = again.unproven == 1
        found.notes.append(
            f"{again.unproven:,} {'decision is' if one else 'decisions are'} made here of which the log does "
            "not prove that a conductor lived to store them"
        )
