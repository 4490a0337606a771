import msgspec
import pytest

from conductor.core.lifecycle import Phase
from conductor.core.replay import Replayer, Verdict
from dalsegno import replay
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


def told(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> str:
    replay._tell(verdict, as_json=False)
    return capsys.readouterr().out.strip()


def test_a_verdict_is_told_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    finished = Verdict(request_id="r", phase=Phase.FINISHED, events=9, decided=3, adopted=1)
    assert told(finished, capsys) == (
        "r: finished: all 3 decisions match (9 events; the admission was taken as recorded)"
    )
    rejected = Verdict(request_id="r", phase=Phase.REJECTED, refusal="model_not_found: who?")
    assert told(rejected, capsys) == "r: rejected, as recorded: model_not_found: who?"
    waiting = Verdict(request_id="r", events=1)
    assert told(waiting, capsys) == "r: waiting: nothing is decided yet"
    cancelled = Verdict(request_id="r", phase=Phase.CANCELLED, events=3, decided=1)
    assert told(cancelled, capsys) == "r: cancelled: the one decision matches (3 events)"


def _of_a_later_version(record: StoredRecord) -> StoredRecord:
    event = decode(record.data, "request" if record.subject.startswith("ds.request.") else None)
    if not isinstance(event, RequestAdmitted) or event.request_id != "foreign":
        return record
    data = encode(msgspec.structs.replace(event, family="a_later_family"))
    return msgspec.structs.replace(record, data=data)
