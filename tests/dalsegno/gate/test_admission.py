"""Single requests, as bundles have them: what does not depend on other requests is decided again."""

import dataclasses
from typing import Any

import msgspec

from conductor.core.schedule import Deployment
from dalsegno.gate import admission
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.gate.scheduling import Redecided
from models import registry
from shared.ids import Rank
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS
from tests.dalsegno.gate.rich_log import RichLog, rich_log

LOG = rich_log(1, "fsfs", 150)


def records_of(request_id: str, log: RichLog) -> list[StoredRecord]:
    """The records that a bundle of the request has."""
    found = [
        one
        for one in log.records
        if (address := SUBJECTS.parse(one.subject)) is not None
        and (address.is_membership or address.request_id == request_id)
    ]
    return [one for one in found if for_conductor(one.subject, SUBJECTS)]


def again(request_id: str, deployment: Deployment | str, log: RichLog = LOG) -> Redecided:
    records = records_of(request_id, log)
    recorded = index(records, SUBJECTS, registry.graph)
    return admission.decide_again(
        records, recorded, lambda _: deployment, subjects=SUBJECTS, graph_of=registry.graph
    )


def requests(log: RichLog) -> list[str]:
    found = (SUBJECTS.parse(one.subject) for one in log.records)
    return list(dict.fromkeys(str(one.request_id) for one in found if one is not None and one.request_id))


def fields(changes: dict[str, Any]) -> set[tuple[str, str]]:
    """Event and field of the differences under another deployment."""
    other = msgspec.structs.replace(LOG.deployment, **changes)
    return {(d.event, d.field) for name in requests(LOG) for d in again(name, other).differences}


def test_under_the_same_deployment_each_request_alone_is_decided_as_among_the_others() -> None:
    found = [again(name, LOG.deployment) for name in requests(LOG)]
    assert [one for result in found for one in result.differences] == []
    assert sum(count for result in found for count in result.decided.values()) > 50


def test_another_limit_shows_in_the_admission() -> None:
    limits = msgspec.structs.replace(LOG.deployment.limits, default_max_tokens=7)
    assert fields({"limits": limits}) == {("request.admitted", "limits.default_max_tokens")}


def test_fewer_concurrent_requests_refuse_the_admission_of_the_last() -> None:
    assert ("request.admitted", "(decision)") in fields({"max_concurrent_requests": 2})


def test_another_model_refuses_what_was_admitted() -> None:
    assert ("request.admitted", "(decision)") in fields({"model": "other"})


def test_a_full_queue_is_taken_as_recorded_and_its_message_is_not() -> None:
    assert ("request.rejected", "failure.message") in fields({"max_waiting": 9})


def test_without_its_configuration_a_request_is_skipped_with_the_reason_and_a_malformed_one_is_not() -> None:
    found = [again(name, "not stored") for name in requests(LOG)]
    assert {why for one in found for why in one.skipped.values()} == {"not stored"}
    assert sum(count for one in found for count in one.decided.values()) > 0  # refusals of the fold


def test_a_rank_that_the_configuration_does_not_have_is_a_reason_not_to_decide() -> None:
    group = dataclasses.replace(LOG.deployment.groups[0], ranks=(Rank(7),))
    other = msgspec.structs.replace(LOG.deployment, groups=(group,))
    skipped = {why for name in requests(LOG) for why in again(name, other).skipped.values()}
    assert "the configuration does not place prepare and llm on rank 0" in skipped
