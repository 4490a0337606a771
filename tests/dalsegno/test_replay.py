import msgspec

from conductor.core.replay import Replayer
from dalsegno.replay import pins
from shared.events import RequestAdmitted, decode, encode
from shared.log.port import StoredRecord
from shared.models import registry
from tests.conductor.script import SUBJECTS, Script


def test_a_family_that_is_not_here_fails_its_own_request_and_no_other() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    for name in ("known", "foreign"):
        script.submit(name)
    replayer = Replayer(registry.graph, SUBJECTS, pins=pins)
    for record in script.records:
        replayer.take(_of_a_later_version(record))
    verdicts = replayer.close()
    assert verdicts["known"].matches
    assert not verdicts["foreign"].matches
    assert any("graph was g, is unknown here" in pin for pin in verdicts["foreign"].pins)


def _of_a_later_version(record: StoredRecord) -> StoredRecord:
    event = decode(record.data, "request" if record.subject.startswith("ds.request.") else None)
    if not isinstance(event, RequestAdmitted) or event.request_id != "foreign":
        return record
    data = encode(msgspec.structs.replace(event, family="a_later_family"))
    return msgspec.structs.replace(record, data=data)
