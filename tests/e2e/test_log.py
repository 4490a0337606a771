"""`dalsegno log` on a deployment that runs, is at rest, and runs again: the index says what the log says."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from shared.subjects import Subjects
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running


def ask(running: Running, request_id: str, prompt: str) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "request_id": request_id}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=clients.PATIENCE_S)
    assert answer.status_code == 200, answer.text


def listed(data_dir: Path, *options: str) -> list[dict[str, Any]]:
    ended = clients.run("log", "--json", *options, "--data-dir", str(data_dir))
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def names(data_dir: Path, *options: str) -> list[str]:
    return [one["request_id"] for one in listed(data_dir, *options)]


def agreed(data_dir: Path) -> list[str]:
    """The ids of all requests, on which the index and the log agree."""
    found = listed(data_dir)
    assert found == listed(data_dir, "--no-index")
    return [one["request_id"] for one in found]


async def _refused(running: Running, request_id: str) -> None:
    subjects = Subjects(running.prefix)
    async with clients.log_of(running, running.client) as log:
        seq = await log.publish(subjects.request(request_id), b"junk")
        async with aclosing(log.read([subjects.walk(request_id)], seq)) as decisions:
            await anext(decisions)


def test_the_index_says_what_the_log_says(tmp_path: Path) -> None:
    with deploy.serve(tmp_path) as running:
        data_dir = running.data_dir
        ask(running, "zip", "What does zip do?")
        asyncio.run(_refused(running, "junk"))
        assert agreed(data_dir) == ["zip", "junk"]
        ask(running, "abs", "What does\nABS do?")
        assert agreed(data_dir) == ["zip", "junk", "abs"]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(names, [data_dir] * 4)) == [["zip", "junk", "abs"]] * 4
        [zip_] = listed(data_dir, "--text", "does ZIP", "--outcome", "finished")
        assert (zip_["request_id"], zip_["ranks"], zip_["attempts"]) == ("zip", [0], 1)
        assert 0 <= zip_["queue_seconds"] <= zip_["first_chunk_seconds"] <= zip_["seconds"]
        assert names(data_dir, "--code", "malformed_request") == ["junk"]
        assert names(data_dir, "--rank", "0", "--not", "text=zip") == ["abs"]
        assert names(data_dir, "--rank", "1") == names(data_dir, "--slower-than", "1h") == []
        assert names(data_dir, "--until", "1h") == []
        assert names(data_dir, "--since", "1h", "--limit", "1") == ["abs"]
    assert {path.name for path in (data_dir / "index").iterdir()} >= {"requests.sqlite", "seal.json"}
    assert agreed(data_dir) == names(data_dir) == ["zip", "junk", "abs"]
    with deploy.serve(tmp_path) as running:
        ask(running, "len", "What does len do?")
        assert agreed(data_dir) == ["zip", "junk", "abs", "len"]
