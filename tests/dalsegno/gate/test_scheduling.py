"""Single cases of scheduling that is decided again; `test_mutations` has the many."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from conductor.core.request import Decision
from conductor.core.schedule import Deployment
from dalsegno.gate import scheduling
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.gate.scheduling import Redecided
from models import registry
from shared.events import EpochOpened, RequestAdmitted, decode, encode
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS, Script, deployment


def begun(**changes: Any) -> Script:
    script = Script(serve=deployment(**changes))
    script.open_epoch()
    script.join()
    return script


def again(records: list[StoredRecord], now: Deployment | str) -> Redecided:
    records = [one for one in records if for_conductor(one.subject, SUBJECTS)]
    recorded = index(records, SUBJECTS, registry.graph)
    return scheduling.decide_again(
        records, recorded, dict.fromkeys(recorded.epochs, now), subjects=SUBJECTS, graph_of=registry.graph
    )


def told(found: Redecided) -> list[tuple[str, str, str, Any, Any]]:
    return [(one.request_id, one.event, one.field, one.recorded, one.found) for one in found.differences]


def one_after_the_other(count: int = 3) -> Script:
    """Requests that wait for each other, because one may run at a time."""
    script = begun(max_concurrent_requests=1)
    for number in range(count):
        script.submit(f"r{number}")
    for number in range(count):
        script.run_to_the_end(f"r{number}")
    return script


def test_the_recorded_decisions_are_made_again() -> None:
    script = one_after_the_other()
    found = again(script.records, script.deployment)
    assert found.decided == {"r0": 1, "r1": 1, "r2": 1}
    assert (found.differences, found.unproven, found.skipped) == ([], 0, {})


def test_a_difference_causes_no_others() -> None:
    script = one_after_the_other()
    found = again(script.records, deployment(max_concurrent_requests=2))
    said = "no choice of ranks; concurrent request 1 of "
    assert told(found) == [
        ("r0", "request.admitted", "limits.max_concurrent", 1, 2),
        ("r0", "request.admitted", "reason", f"{said}1", f"{said}2"),
        ("r1", "request.admitted", "(when)", "as recorded", "earlier"),
        ("r1", "request.admitted", "limits.max_concurrent", 1, 2),
        ("r1", "request.admitted", "reason", f"{said}1", f"{said}2"),
        ("r2", "request.admitted", "(when)", "as recorded", "earlier"),
        ("r2", "request.admitted", "limits.max_concurrent", 1, 2),
        ("r2", "request.admitted", "reason", f"{said}1", f"{said}2"),
    ]


def test_what_is_never_decided_now_is_applied_as_recorded() -> None:
    script = one_after_the_other(2)
    found = again(script.records, deployment(max_concurrent_requests=0))
    assert told(found) == [
        (name, "request.admitted", "(when)", "as recorded", "later or never") for name in ("r0", "r1")
    ]


def test_a_refusal_that_was_none_is_told_once_and_the_admission_is_applied() -> None:
    script = one_after_the_other(1)
    found = again(script.records, deployment(model="another", max_concurrent_requests=1))
    assert told(found) == [("r0", "request.rejected", "(decision)", None, "model_not_found")]
    assert found.decided == {"r0": 1}


def test_what_a_dead_conductor_did_not_store_is_no_difference() -> None:
    script = begun()
    script.submit("r0")
    script.run_to_the_end("r0")
    script.lead = False
    script.submit("r1")
    found = again(script.records, script.deployment)
    assert (found.differences, found.unproven) == ([], 1)


def test_what_its_successor_decides_is_compared_in_the_successors_epoch() -> None:
    script = begun()
    script.lead = False
    script.submit("r0")
    script.lead, script._number = True, 0
    script.open_epoch(2, "c2")
    script.run_to_the_end("r0")
    found = again(script.records, script.deployment)
    assert (found.decided, found.differences, found.unproven) == ({"r0": 1}, [], 1)


class LossyScript(Script):
    """A script whose log never gets the admission of `r0`; its conductor does not know."""

    def publish(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, RequestAdmitted) and decision.request_id == "r0":
                self._number += 1
            else:
                super().publish([decision])


def test_a_decision_that_never_reached_the_log_is_told_by_the_missing_number() -> None:
    script = LossyScript()
    script.open_epoch()
    script.join()
    script.submit("r0")
    script.submit("r1")
    script.run_to_the_end("r1")
    found = again(script.records, script.deployment)
    assert (found.decided, found.differences, found.unproven) == ({"r1": 1}, [], 1)


def test_an_exception_of_the_scheduler_is_a_difference_and_the_log_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = one_after_the_other(2)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no ranks")

    monkeypatch.setattr("conductor.core.cluster.schedule", fail)
    found = again(script.records, script.deployment)
    assert told(found)[0][1:] == ("scheduler", "(error)", None, "ZeroDivisionError: no ranks")
    assert [one[2] for one in told(found)] == ["(error)", "(when)", "(when)"]


def test_without_a_deployment_decisions_are_skipped_with_the_reason() -> None:
    script = one_after_the_other(2)
    found = again(script.records, "its configuration is not stored here")
    assert found.skipped == dict.fromkeys(("r0", "r1"), "its configuration is not stored here")
    assert (found.decided, found.differences) == ({}, [])


def test_logs_of_older_versions_are_compared_without_what_they_did_not_record() -> None:
    script = one_after_the_other(1)
    records = [_older(one) for one in script.records]
    assert again(records, script.deployment).differences == []


def _older(record: StoredRecord) -> StoredRecord:
    event = decode(record.data)
    if not isinstance(event, RequestAdmitted):
        return record
    limits = msgspec.structs.replace(event.limits, concurrent=0)
    event = msgspec.structs.replace(event, limits=limits, lives={}, weights={}, revisions=[])
    return msgspec.structs.replace(record, data=encode(event))


def test_a_decision_of_a_deposed_conductor_is_none() -> None:
    script = begun()
    script.submit("r0")
    [admitted] = [one for one in script.records if isinstance(decode(one.data), RequestAdmitted)]
    opened = EpochOpened(id="epoch.2.c2", writer="conductor", epoch=2, conductor="c2", core="k")
    kept = [one for one in script.records if one.seq < admitted.seq]
    records = [
        *kept,
        msgspec.structs.replace(admitted, subject=SUBJECTS.epoch, data=encode(opened)),
        msgspec.structs.replace(admitted, seq=admitted.seq + 1),
    ]
    found = again(records, script.deployment)
    assert (found.decided, found.differences, found.unproven) == ({}, [], 2)
