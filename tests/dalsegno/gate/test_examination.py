import msgspec

from dalsegno.gate.deployments import Deployments
from dalsegno.gate.examination import Recording, control_of, schedule_of
from shared.events import WorkerJoined, decode
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS, Script


def recorded() -> Script:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("r1")
    return script


def log(records: list[StoredRecord], begins: str = "") -> Recording:
    return Recording(name="log", subjects=SUBJECTS, records=records, begins=begins)


def of_later_version(record: StoredRecord) -> StoredRecord:
    raw = {**msgspec.msgpack.decode(record.data), "type": "worker.joined.v9"}
    return msgspec.structs.replace(record, data=msgspec.msgpack.encode(raw))


def test_a_log_without_its_beginning_cannot_be_scheduled_again() -> None:
    found = schedule_of(log(recorded().records, "the log begins at record 7"), {"r1"}, Deployments({}))
    assert (found.whole, found.decided) == ("the log begins at record 7", {})


def test_a_log_with_events_of_a_later_version_cannot_either() -> None:
    records = [
        of_later_version(one) if isinstance(decode(one.data), WorkerJoined) else one
        for one in recorded().records
    ]
    found = schedule_of(log(records), {"r1"}, Deployments({}))
    assert found.whole == "record 2 is a worker.joined.v9, which this version does not know"


def test_what_a_client_writes_on_its_subject_stops_nothing() -> None:
    script = recorded()
    script.say(SUBJECTS.request("r2"), msgspec.msgpack.encode({"type": "request.submitted.v9"}))
    found = schedule_of(log(script.records), {"r1"}, Deployments({}))
    assert found.whole == "its configuration is not stored here; name one with --config"


def test_an_open_request_may_lack_its_last_decisions_and_an_ended_one_may_not() -> None:
    records = recorded().records[:-1]  # without the first order
    running = control_of(log(records), {"r1"}, unended={"r1"})
    assert running.differences == []
    assert running.notes == ["1 open request lacks its last decisions, which were not stored yet"]
    [one] = control_of(log(records), {"r1"}).differences
    assert (one.event, one.field, one.recorded, one.found) == ("node.ready", "(decision)", None, "node.ready")


def test_only_the_chosen_requests_are_decided() -> None:
    script = recorded()
    script.submit("r2")
    assert control_of(log(script.records), {"r2"}, {"r1", "r2"}).decided.keys() == {"r2"}
