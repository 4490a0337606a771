import pytest

from dalsegno.history import request_records
from shared.errors import ClientError
from shared.events import WorkerLeaving
from shared.log.memory import MemoryLog, MemoryStore
from tests.conductor.script import SUBJECTS, Script


def log_of(script: Script) -> tuple[MemoryStore, MemoryLog]:
    server = MemoryStore(SUBJECTS)
    for record in script.records:
        server.append(record.subject, record.data)
    return server, MemoryLog(server)


def asked(*ids: str, **submission: object) -> Script:
    script = Script()
    script.open_epoch()
    script.join()
    for request_id in ids:
        script.submit(request_id, **submission)
        script.run_to_the_end(request_id)
    return script


async def test_a_requests_own_records_and_the_worlds_up_to_its_end() -> None:
    script = asked("before", "r1", "behind")
    script.say(SUBJECTS.worker(0), WorkerLeaving(id="bye", writer="w0", rank=0, incarnation=2))
    _, log = log_of(script)
    found = await request_records.collect(log, SUBJECTS, "r1")
    assert found.requests == ["r1"]
    kinds = {record.subject.split(".")[1] for record in found.records}
    assert kinds == {"conductor", "worker", "request", "walk", "ready", "done"}
    assert {r.subject.split(".")[-1] for r in found.records} == {"epoch", "0", "r1"}
    assert found.records[-1].subject == SUBJECTS.walk("r1")


@pytest.mark.parametrize("parts", [3, 20])
async def test_all_parts_of_a_question_with_several_answers(parts: int) -> None:
    ids = ["r1", *(f"r1-{number}" for number in range(1, parts))]
    _, log = log_of(asked(*ids, "r1-99", parent="r1", parts=parts))
    found = await request_records.collect(log, SUBJECTS, "r1")
    assert found.requests == ids
    own = {r.subject.split(".")[-1] for r in found.records if r.subject.startswith("ds.request.")}
    assert own == set(ids)


async def test_a_part_is_collected_by_itself() -> None:
    _, log = log_of(asked("r1", "r1-1", parent="r1", parts=2))
    found = await request_records.collect(log, SUBJECTS, "r1-1")
    assert found.requests == ["r1-1"]


async def test_a_submission_that_cannot_be_read_is_collected_too() -> None:
    script = Script()
    script.open_epoch()
    script.say(SUBJECTS.request("r1"), b"junk")
    _, log = log_of(script)
    assert len((await request_records.collect(log, SUBJECTS, "r1")).records) == 3


async def test_who_never_asked_is_told_so() -> None:
    _, log = log_of(asked("r1"))
    with pytest.raises(ClientError, match="the log holds no submission of request 'r2'; `dalsegno log`"):
        await request_records.collect(log, SUBJECTS, "r2")
    with pytest.raises(ClientError, match="request_id"):
        await request_records.collect(log, SUBJECTS, "no.id")


async def test_what_has_expired_is_said_to_have_expired() -> None:
    script = asked("r1")
    server, log = log_of(script)
    ready = next(r.seq for r in script.records if r.subject == SUBJECTS.ready(0, "r1"))
    server.forget(ready - 1)
    with pytest.raises(ClientError, match=f"its submission has expired; the log begins with record {ready}"):
        await request_records.collect(log, SUBJECTS, "r1")
    server.forget(len(script.records))
    server.append(SUBJECTS.request("r9"), b"{}")
    with pytest.raises(ClientError, match=r"records before \d+ have expired"):
        await request_records.collect(log, SUBJECTS, "r1")


@pytest.mark.parametrize("others", [0, 20])
async def test_the_records_of_some_requests_between_two_positions(others: int) -> None:
    """Of a few requests they are read by subject, of many from the whole range."""
    more = [f"r{number}" for number in range(10, 10 + others)]
    script = asked("r1", "r2", *more, "r3")
    _, log = log_of(script)
    wanted = {"r1", "r3", *more}
    last = len(script.records)
    found = [
        record.seq async for record in request_records.records_between(log, SUBJECTS, wanted, 5, last - 1)
    ]
    assert found == [
        record.seq
        for record in script.records[4 : last - 1]
        if record.subject.split(".")[-1] in wanted and "worker" not in record.subject
    ]
    assert found[0] <= 6
    nothing = request_records.records_between(log, SUBJECTS, [], 1, last)
    assert [record async for record in nothing] == []
