import pytest

from dalsegno.history.summary import COLUMNS, Summary
from dalsegno.history.summary_fold import summaries
from dalsegno.terminal import tables
from shared.events import Event, RequestFinished, Usage, encode
from shared.events import OutputTotals as Totals
from shared.log.memory import MemoryLog, MemoryStore
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor.script import SUBJECTS, Script


async def listed(script: Script) -> dict[str, Summary]:
    log = MemoryLog(MemoryStore(SUBJECTS))
    for record in script.records:
        assert await log.publish(record.subject, record.data) == record.seq
    return {summary.request_id: summary for summary in await summaries(log, SUBJECTS)}


def line(summary: Summary) -> str:
    """The summary's line in the plain listing."""
    return tables.plain_lines(COLUMNS, [summary.row()])[1]


@pytest.fixture
def script() -> Script:
    """One finished request, `r1`."""
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.run_to_the_end()
    return script


async def test_a_finished_request_has_its_numbers(script: Script) -> None:
    found = (await listed(script))["r1"]
    end: RequestFinished = script.last(RequestFinished)
    assert found.plain()["outcome"] == "finished"
    assert found.plain()["finish_reason"] == end.finish_reasons[0]
    assert found.plain()["prompt_tokens"] == end.usage.prompt_tokens
    assert f" {end.usage.prompt_tokens}+{end.usage.completion_tokens} " in line(found)


async def test_what_is_refused_of_an_id_later_is_not_its_outcome(script: Script) -> None:
    script.submit(model="another")
    script.say(SUBJECTS.request("r1"), b"junk")
    assert "RequestRejected" in script.kinds()
    assert (await listed(script))["r1"].outcome == "finished"


async def test_a_submission_that_cannot_be_read_is_listed_with_its_refusal(script: Script) -> None:
    script.say(SUBJECTS.request("bad"), b"junk")
    script.say(SUBJECTS.request("a/b"), b"junk")  # no id, but its sender may look for it
    found = await listed(script)
    assert [(one.model, one.outcome, one.code) for one in (found["bad"], found["a/b"])] == [
        (None, "rejected", "malformed_request")
    ] * 2
    assert " ? " in line(found["bad"])
    assert " rejected: malformed_request " in line(found["bad"])


async def test_an_id_is_taken_by_its_first_submission_that_can_be_read(script: Script) -> None:
    script.say(SUBJECTS.request("r2"), b"junk")
    script.submit("r2")
    script.run_to_the_end("r2")
    found = (await listed(script))["r2"]
    assert (found.model, found.outcome) == ("demo", "finished")


async def test_a_request_without_an_end_has_no_numbers(script: Script) -> None:
    script.submit("r2")
    found = (await listed(script))["r2"]
    assert (found.outcome, found.plain()["seconds"], found.plain()["prompt_tokens"]) == ("open", None, None)


async def test_the_word_of_a_deposed_conductor_ends_nothing(script: Script) -> None:
    script.submit("r2")
    script.open_epoch(2, "c2")
    void: Event = RequestFinished(
        id="r2.end",
        writer=CONDUCTOR_WRITER,
        epoch=1,
        request_id="r2",
        usage=Usage(),
        finish_reasons=["stop"],
        output=Totals(),
        history=b"",
    )
    script.store(SUBJECTS.walk("r2"), encode(void))
    assert (await listed(script))["r2"].outcome == "open"
