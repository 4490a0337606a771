import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from dalsegno.replay import resubmission
from dalsegno.replay.resubmission import Submission
from shared.errors import BugError, CapacityError, ClientError
from shared.events import Inputs, RequestSubmitted, WorkerJoined, decode
from shared.log.memory import MemoryLog, MemoryStore
from tests.conductor.script import SUBJECTS, Script


def request(name: str) -> RequestSubmitted:
    return RequestSubmitted(request_id=name, model="demo", inputs=Inputs(text="What?"))


@asynccontextmanager
async def deployed(server: MemoryStore) -> AsyncIterator[None]:
    """A conductor and a worker, as a script plays them, on a log in memory."""
    script, log = Script(), MemoryLog(server)
    script.open_epoch()
    script.join()
    for record in script.records:
        server.append(record.subject, record.data)

    async def play() -> None:
        async for record in log.read([SUBJECTS.request("*")], 1):
            before = len(script.records)
            event = decode(record.data, "request")
            assert isinstance(event, RequestSubmitted)
            script.say(record.subject, event)
            script.run_to_the_end(str(event.request_id))
            for one in script.records[before + 1 :]:
                server.append(one.subject, one.data)

    task = asyncio.ensure_future(play())
    yield
    task.cancel()
    await log.close()


async def test_answers_are_followed_to_their_ends_in_the_order_of_asking() -> None:
    server = MemoryStore(SUBJECTS)
    log = MemoryLog(server)
    async with deployed(server):
        asked = [Submission(event=request(name)) for name in ("b", "a")]
        found = await resubmission.answers(log, SUBJECTS, asked)
    assert list(found) == ["b", "a"]
    assert {reply.outcome for reply in found.values()} == {"finished"}
    assert all(reply.whole_s is not None and reply.whole_s > 0 for reply in found.values())


async def test_what_is_asked_says_by_whom_and_where_the_answer_is_wanted() -> None:
    server = MemoryStore(SUBJECTS)
    log = MemoryLog(server)
    async with deployed(server):
        await resubmission.answers(log, SUBJECTS, [Submission(event=request("a"))])
    [record] = [one for one in server.records if one.subject == SUBJECTS.request("a")]
    event = decode(record.data, "request")
    assert isinstance(event, RequestSubmitted)
    assert event.writer == resubmission.WRITER
    assert event.origin.startswith("replay-")


async def test_an_id_that_is_taken_is_said_to_be_and_nothing_waits() -> None:
    server = MemoryStore(SUBJECTS)
    log = MemoryLog(server)
    await resubmission.submit(log, SUBJECTS, request("a"))
    with pytest.raises(ClientError, match="request_id 'a' is taken; choose another"):
        await resubmission.answers(log, SUBJECTS, [Submission(event=request("a"))])


async def test_the_model_is_the_one_that_a_worker_has() -> None:
    server = MemoryStore(SUBJECTS)
    log = MemoryLog(server)
    with pytest.raises(CapacityError, match="no worker has been ready yet under the prefix 'ds'"):
        await resubmission.model_served(log, SUBJECTS)
    joined = WorkerJoined(id="w", rank=0, model="other", nodes=[], device="cpu")
    server.append(SUBJECTS.worker(0), msgspec.msgpack.encode(joined))
    assert await resubmission.model_served(log, SUBJECTS) == "other"


def test_of_a_group_the_error_that_is_for_the_person() -> None:
    mine = ClientError("mine")
    assert resubmission.error_in(ExceptionGroup("", [ExceptionGroup("", [ValueError(), mine])])) is mine
    bug = ExceptionGroup("", [ValueError()])
    assert resubmission.error_in(bug) is bug
    assert isinstance(resubmission.error_in(ExceptionGroup("", [BugError("x")])), BugError)
