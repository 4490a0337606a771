"""The studio beside a running deployment: a live list, and a changed version of a request, asked from it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.events import RequestFinished, RequestSubmitted
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer

pytestmark = pytest.mark.timeout(300)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@contextmanager
def studio(data_dir: Path, *options: str) -> Iterator[httpx.Client]:
    """A studio on a data dir, and a browser's session in it."""
    command = [sys.executable, "-m", "dalsegno", "studio", str(data_dir), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if "/enter?token=" in line)
        found = re.search(r"(http://[^/]+)(/enter\S+)", said)
        assert found is not None, said
        own = {"origin": found[1], "x-dalsegno-studio": "1"}
        with httpx.Client(base_url=found[1], timeout=60, headers=own, follow_redirects=True) as browser:
            assert browser.get(found[2]).status_code == 200
            yield browser
        process.terminate()


def ended(browser: httpx.Client, request_id: str) -> dict[str, Any]:
    """The request, once it has ended: asked for at each piece of news."""
    with browser.stream("GET", "/api/live") as news:
        for line in news.iter_lines():
            if not line.startswith("data: "):
                continue
            assert "error" not in json.loads(line.removeprefix("data: "))
            answer = browser.get("/api/request", params={"source": "log", "id": request_id})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            if found["ended"]:
                return found
    raise AssertionError("the news ended")


async def test_a_changed_version_is_asked_and_compared(tmp_path: Path) -> None:
    with deploy.serve(tmp_path) as running:
        async with clients.http(running) as http, clients.reader(running) as reader:
            await clients.generate(http, Answer("first"), "What does len do?", **GREEDY)
            await reader.until(reader.subjects.walk("first"), RequestFinished)
            about = {"source": "log", "id": "first"}
            with studio(running.data_dir, "--allow-ask") as browser:
                question = about | {"set": "max_tokens=5"}
                shown = browser.get("/api/fork", params=question).json()
                asked = browser.post("/api/fork", params=question)
                assert asked.status_code == 200, asked.text
                new = asked.json()["request_id"]
                found = ended(browser, new)
                pair = about | {"source2": "log", "id2": new}
                compared = browser.get("/api/compare", params=pair).json()
                decisions = browser.get("/api/decisions", params=about).json()["decisions"]
                [admitted] = [row["seq"] for row in decisions if row["type"] == "request.admitted"]
                chosen = browser.get("/api/alternatives", params={"source": "log", "seq": admitted}).json()
            _, submitted = await reader.until(reader.subjects.request(new), RequestSubmitted)
    assert shown["differences"] == [{"field": "params.max_tokens", "recorded": 12, "asked": 5}]
    assert submitted.params.max_tokens == 5
    assert found["forked_from"]["request_id"] == "first"
    assert found["output"]["usage"]["completion_tokens"] == 5
    assert [one["request_id"] for one in chosen["queue"]] == ["first"]
    assert {rank["verdict"] for group in chosen["groups"] for rank in group["ranks"]} == {"chosen"}
    [texts] = compared["texts"]
    before, after = texts["texts"]
    assert before.startswith(after)
    assert len(after) < len(before)


async def test_without_permission_nothing_is_submitted(tmp_path: Path) -> None:
    with deploy.serve(tmp_path) as running:
        async with clients.http(running) as http, clients.reader(running) as reader:
            await clients.generate(http, Answer("first"), "What does len do?", **GREEDY)
            last = (await reader.log.state()).last_seq
            with studio(running.data_dir) as browser:
                refused = browser.post("/api/fork", params={"source": "log", "id": "first"})
            assert (refused.status_code, "--allow-ask" in refused.text) == (400, True)
            submitted = [
                record async for record in reader.log.history([reader.subjects.request("*")], last + 1)
            ]
            assert submitted == []
