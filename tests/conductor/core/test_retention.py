"""The memory of requests that ended: bounded by number, size and time, and still right afterwards."""

import msgspec
import pytest

from conductor.core import retention
from conductor.core.cluster import Cluster
from conductor.core.retention import LIVE, size_of
from conductor.core.snapshot import dump, load
from models import registry
from shared.events import Inputs, RequestFinished, RequestRejected, decode, encode
from tests.conductor.script import SUBJECTS, Script


def script_with(**limits: int) -> Script:
    script = Script()
    script.cluster.retention = msgspec.structs.replace(LIVE, **limits)
    script.open_epoch()
    script.join()
    return script


def end(script: Script, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        script.submit(f"r{number}")
        script.run_to_the_end(f"r{number}")


def test_full_states_are_bounded_by_number() -> None:
    script = script_with(ended=5)
    end(script, 20)
    assert list(script.cluster.ended) == [f"r{number}" for number in range(15, 20)]
    assert len(script.cluster.digests) == 20


def test_full_states_are_bounded_by_size() -> None:
    script = script_with()
    end(script, 1)
    size = size_of(script.cluster.ended["r0"])
    script.cluster.retention = msgspec.structs.replace(LIVE, ended_bytes=4 * size + size // 2)
    end(script, 20, first=1)
    assert 2 <= len(script.cluster.ended) <= 5
    assert script.cluster.ended_bytes == sum(map(size_of, script.cluster.ended.values()))


def test_full_states_are_bounded_by_time() -> None:
    script = script_with(ended_ns=10_000_000)  # ten records of the script
    end(script, 20)
    assert 1 <= len(script.cluster.ended) <= 5


def test_a_request_whose_end_is_not_in_the_log_is_kept_for_a_successor() -> None:
    script = script_with(ended=1)
    script.submit("r0")
    publish = script.publish
    script.publish = lambda decisions: publish(  # type: ignore[method-assign]
        one for one in decisions if not isinstance(one, RequestFinished)
    )
    script.run_to_the_end("r0")
    script.publish = publish  # type: ignore[method-assign]
    end(script, 5, first=1)
    assert "r0" in script.cluster.ended
    assert [decision.request_id for decision in script.cluster.outstanding()] == ["r0"]


def test_a_second_submission_of_a_forgotten_request_is_still_known_from_its_digest() -> None:
    script = script_with(ended=1)
    end(script, 10)
    script.submit("r0")
    assert "r0" not in script.cluster.open


def test_a_late_fact_of_a_forgotten_request_has_no_effect() -> None:
    script = script_with(ended=1)
    end(script, 10)
    script.cancel("r0")
    assert not script.cluster.open


def test_digests_are_bounded_by_number_and_the_log_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_FORGET_EVERY", 2)
    script = script_with(ended=1, digests=4)
    end(script, 20)
    cluster = script.cluster
    assert len(cluster.digests) < 8
    first = next(record for record in script.records if record.subject == SUBJECTS.request("r0"))
    again = msgspec.structs.replace(first, seq=cluster.seq + 1)
    assert cluster.may_have_forgotten(again) == "r0"
    assert cluster.recall("r0", first)
    assert cluster.may_have_forgotten(again) is None
    assert "runs once" in str(cluster.fold(again).note)
    assert "r0" not in cluster.open


def test_nothing_is_looked_up_before_something_was_forgotten() -> None:
    script = script_with()
    end(script, 3)
    record = next(record for record in script.records if record.subject == SUBJECTS.request("r0"))
    new = msgspec.structs.replace(record, seq=script.cluster.seq + 1, subject=SUBJECTS.request("new"))
    assert script.cluster.may_have_forgotten(new) is None


def test_a_conflicting_submission_of_a_recalled_request_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_FORGET_EVERY", 2)
    script = script_with(ended=1, digests=4)
    end(script, 20)
    first = next(record for record in script.records if record.subject == SUBJECTS.request("r0"))
    script.cluster.recall("r0", first)
    script.submit("r0", inputs=Inputs(text="something else"))
    rejected = script.last(RequestRejected, "r0")
    assert rejected is not None
    assert rejected.failure.code == "request_id_conflict"


def test_a_restored_cluster_forgets_the_same() -> None:
    script = script_with(ended=3)
    end(script, 5)
    restored = load(dump(script.cluster), registry.graph, SUBJECTS)
    assert isinstance(restored, Cluster)
    assert restored.ended_bytes == script.cluster.ended_bytes
    assert restored.forgotten_ns == script.cluster.forgotten_ns
    assert restored.retention == LIVE


def test_a_submission_that_says_it_is_the_first_is_looked_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_FORGET_EVERY", 2)
    script = script_with(ended=1, digests=4)
    end(script, 20)
    first = next(record for record in script.records if record.subject == SUBJECTS.request("r0"))
    event = msgspec.structs.replace(decode(first.data), is_first=True)
    liar = msgspec.structs.replace(first, seq=script.cluster.seq + 1, data=encode(event))
    assert script.cluster.may_have_forgotten(liar) == "r0"


def test_a_submission_of_another_request_is_not_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_FORGET_EVERY", 2)
    script = script_with(ended=1, digests=4)
    end(script, 20)
    first = next(record for record in script.records if record.subject == SUBJECTS.request("r0"))
    misplaced = msgspec.structs.replace(first, subject=SUBJECTS.request("other"))
    assert not script.cluster.recall("other", misplaced)
