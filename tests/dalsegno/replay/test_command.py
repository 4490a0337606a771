import msgspec
import pytest

from conductor.core.lifecycle import Phase
from conductor.core.replay import Mismatch, Replayer, Verdict
from dalsegno.replay import verdicts
from dalsegno.replay.verdicts import ControlResult, pins
from models import registry
from shared.events import RequestAdmitted, decode, encode
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS, Script


def test_a_family_that_is_not_here_fails_its_own_request_and_no_other() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    for name in ("known", "foreign"):
        script.submit(name)
    replayer = Replayer(registry.graph, SUBJECTS, pins=pins)
    records = [_of_a_later_version(record) for record in script.records]
    for record in records:
        replayer.replay_record(record)
    found = replayer.close()
    assert found["known"].matches
    assert not found["foreign"].matches
    assert any("graph was g, is unknown here" in pin for pin in found["foreign"].pins)
    assert verdicts.why_not(records, SUBJECTS, "known") is None
    assert str(verdicts.why_not(records, SUBJECTS, "foreign")).startswith("its family is not installed here")


def test_an_event_of_a_later_version_is_named() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    raw = {**msgspec.msgpack.decode(script.records[-1].data), "type": "node.ready.v9"}
    later = msgspec.structs.replace(script.records[-1], data=msgspec.msgpack.encode(raw))
    why = verdicts.why_not([*script.records[:-1], later], SUBJECTS, "r1")
    assert str(why).startswith(f"record {later.seq} is a node.ready.v9, which this version does not know")


def told(verdict: Verdict, source: str | None = None, cannot: str | None = None) -> list[str]:
    return verdicts.lines(ControlResult(verdict=verdict, source=source, cannot=cannot))


def test_a_verdict_is_told_in_plain_words() -> None:
    finished = Verdict(request_id="r", phase=Phase.FINISHED, events=9, decided=3, adopted=1)
    assert told(finished) == [
        "r: finished: all 3 decisions match (control replay of 9 events; the admission was taken as recorded)"
    ]
    rejected = Verdict(request_id="r", phase=Phase.REJECTED, refusal="model_not_found: who?")
    assert told(rejected) == ["r: rejected, as recorded: model_not_found: who?"]
    waiting = Verdict(request_id="r", events=1)
    assert told(waiting) == ["r: waiting: nothing is decided yet"]
    cancelled = Verdict(request_id="r", phase=Phase.CANCELLED, events=3, decided=1)
    assert told(cancelled) == ["r: cancelled: the one decision matches (control replay of 3 events)"]
    assert told(finished, source="f.bundle", cannot="of another time") == [
        "f.bundle: r: cannot be replayed: of another time"
    ]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("mm", "2 of 2 requests match"),
        ("md", "1 of 2 requests match; 1 differs"),
        ("dd", "0 of 2 requests match; 2 differ"),
        ("mdc", "1 of 3 requests match; 1 differs; 1 cannot be replayed"),
    ],
)
def test_a_summary_counts_what_matches_what_differs_and_what_cannot_be_replayed(
    kinds: str, expected: str
) -> None:
    def outcome(kind: str) -> ControlResult:
        verdict = Verdict(request_id="r")
        if kind == "d":
            verdict.mismatch = Mismatch(seq=1, what="other")
        return ControlResult(verdict=verdict, cannot="why" if kind == "c" else None)

    found = [outcome(kind) for kind in kinds]
    assert verdicts.summary(found) == expected
    assert [one.matches for one in found] == [kind == "m" for kind in kinds]


def _of_a_later_version(record: StoredRecord) -> StoredRecord:
    event = decode(record.data, "request" if record.subject.startswith("ds.request.") else None)
    if not isinstance(event, RequestAdmitted) or event.request_id != "foreign":
        return record
    data = encode(msgspec.structs.replace(event, family="a_later_family"))
    return msgspec.structs.replace(record, data=data)
