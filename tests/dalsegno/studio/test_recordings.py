"""A log in the studio: its list is that of `dalsegno log`, odd records do no harm, and news of it arrive."""

import asyncio
from pathlib import Path

import pytest

from dalsegno.history.log_source import OpenedLog
from dalsegno.history.request_filter import RequestFilter
from dalsegno.history.summary_fold import summaries
from dalsegno.studio.following import Follower
from dalsegno.studio.recordings import LogRecording, Shelf
from shared.errors import ClientError
from shared.log.nats.credentials import Credentials
from tests.conductor.script import SUBJECTS
from tests.dalsegno.history.odd_log import OddLog
from tests.dalsegno.studio.pages import Visitor


def recording(odd: OddLog, index: Path, *, is_live: bool = False) -> LogRecording:
    opened = OpenedLog(log=odd.log, subjects=SUBJECTS, url="", credentials=Credentials(), index=index)
    return LogRecording(name="odd", opened=opened, configs={}, is_live=is_live)


@pytest.mark.parametrize("seed", range(3))
async def test_the_list_of_a_log_is_that_of_a_reader_of_the_whole_log(seed: int, tmp_path: Path) -> None:
    odd = OddLog(seed)
    odd.grow(300)

    rows = await recording(odd, tmp_path / "index").rows(RequestFilter(), 1000)

    expected = [one.plain() for one in await summaries(odd.log, SUBJECTS)]
    assert [row.summary.plain() for row in reversed(rows)] == expected


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_of_an_odd_log_is_shown_or_refused_with_a_reason(
    seed: int, tmp_path: Path
) -> None:
    odd = OddLog(seed)
    odd.grow(300)
    shelf = Shelf(log=recording(odd, tmp_path / "index"))
    one = Visitor(shelf)
    await one.enter()

    for row in (await one.get("/api/requests"))["rows"]:
        at = {"source": "log", "id": row["request_id"]}
        for path in ("request", "events", "decisions"):
            answer = await one.http.get(f"/api/{path}", params=at)
            assert answer.status_code in (200, 400), answer.text
            assert answer.status_code == 200 or answer.json()["error"]


async def test_a_request_that_goes_on_is_read_again_and_one_that_ended_is_kept(tmp_path: Path) -> None:
    odd = OddLog(5)
    odd.grow(400)
    log = recording(odd, tmp_path / "index")
    ends = {row.summary.request_id: row.summary.outcome for row in await log.rows(RequestFilter(), 1000)}
    found = {}
    for name in ends:
        try:
            found[name] = await log.study(name)
        except ClientError:
            continue
    assert found
    odd.grow(1)

    for name, study in found.items():
        assert (await log.study(name) is study) == study.has_ended


async def test_news_of_a_log_name_the_requests_that_changed() -> None:
    odd = OddLog(1)
    odd.grow(10)
    follower = Follower(odd.log, SUBJECTS)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follower.follow())
        news = follower.news()
        assert (await anext(news))["requests"] == []
        heard = tasks.create_task(anext(news))
        while not heard.done():
            odd.grow(5)
            await asyncio.wait([heard], timeout=0.05)
        following.cancel()

    assert heard.result()["requests"]
    assert heard.result()["seq"] > 10
