"""A batch through kills of the gateway that runs it, the worker, the conductor and the log's server.

`BATCH_LINES=10000` is the long form of the same test (`make soak`).
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, Final

import httpx
import pytest

from shared.events import (
    AnyEvent,
    BatchClaimed,
    BatchEnded,
    BatchEvent,
    RequestCancel,
    RequestFinished,
    RequestSubmitted,
    decode,
)
from tests.e2e import clients, deploy
from tests.e2e.clients import Reader
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

LINES: Final = int(os.environ.get("BATCH_LINES", "240"))
BROKEN: Final = range(0, LINES, LINES // 4)
"""Lines that ask another route than the batch's."""
PATIENCE_S: Final = 60.0 + LINES
CHAT: Final = "/v1/chat/completions"
PARAMS: Final = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two gateways before one worker."""
    options = ("--set", "recovery.gateways=2", "--set", "name=tiny")
    folder = tmp_path_factory.mktemp("batches")
    with deploy.serve(folder, *options, model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


def body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me about wizard {number}."}]
    return {"model": "tiny", "messages": messages, **PARAMS}


def jsonl() -> bytes:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body(number)}
        for number in range(LINES)
    ]
    for number in BROKEN:
        lines[number]["url"] = "/v1/unknown"
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def finished_lines(reader: Reader, batch_id: str, count: int) -> None:
    """Wait until the requests of that many lines have finished on the log.

    The batch's own numbers come once a second, and none after its end: a fast machine would pass the count
    between two of them.
    """
    subjects, finished = reader.subjects, 0
    control = [subjects.request("*"), subjects.walk("*"), subjects.control("*")]
    async with asyncio.timeout(PATIENCE_S), aclosing(reader.log.read(control, 1)) as records:
        async for record in records:
            address = subjects.parse(record.subject)
            event = decode(record.data, address.kind if address else None)
            if isinstance(event, RequestFinished) and str(event.request_id).startswith(batch_id):
                finished += 1
            if finished >= count:
                return


async def until_ended(reader: Reader, batch_id: str) -> None:
    """Wait for the end of a batch on the log."""
    async with (
        asyncio.timeout(PATIENCE_S),
        aclosing(reader.log.read([reader.subjects.batch(batch_id)], 1)) as records,
    ):
        async for record in records:
            if isinstance(decode(record.data), BatchEnded):
                return


async def events_of(reader: Reader, *subjects: str) -> list[AnyEvent]:
    found = []
    async with aclosing(reader.log.history(list(subjects))) as records:
        async for record in records:
            address = reader.subjects.parse(record.subject)
            found.append(decode(record.data, address.kind if address else None))
    return found


async def results(http: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    response = await http.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200
    return [json.loads(line) for line in response.text.splitlines()]


def said(response: dict[str, Any]) -> str:
    text: str = response["choices"][0]["message"]["content"]
    return text


async def test_a_batch_survives_kills_with_each_line_answered_once_and_unchanged(running: Running) -> None:
    _, other = running.now.urls
    async with (
        httpx.AsyncClient(base_url=other, timeout=clients.PATIENCE_S) as http,
        clients.reader(running) as reader,
    ):
        expected = {
            f"line-{number}": said((await http.post(CHAT, json=body(number))).json())
            for number in range(1, 25)
        }
        file = await http.post("/v1/files", files={"file": ("in.jsonl", jsonl())}, data={"purpose": "batch"})
        made = await http.post(
            f"{running.url}/v1/batches",
            json={"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"},
        )
        batch_id = made.json()["id"]
        for count, victim in enumerate(("gateway", "worker", "conductor", "nats"), 1):
            await finished_lines(reader, batch_id, count * LINES // 6)
            pids = running.pids
            pid = {
                "gateway": pids.gateway[0],
                "worker": pids.worker["0"],
                "conductor": pids.conductor[0],
                "nats": pids.nats,
            }[victim]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        await until_ended(reader, batch_id)
        batch = (await http.get(f"/v1/batches/{batch_id}")).json()
        good = await results(http, batch["output_file_id"])
        bad = await results(http, batch["error_file_id"])
        subjects = reader.subjects
        of_batch = await events_of(reader, subjects.batch(batch_id))
        of_lines = await events_of(reader, subjects.request("*"), subjects.walk("*"), subjects.control("*"))

    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": LINES, "completed": LINES - 4, "failed": 4}
    # Every line has one result, in the order of the file, and the answers are those of an undisturbed run.
    assert [one["custom_id"] for one in good] == [f"line-{n}" for n in range(LINES) if n not in BROKEN]
    assert [one["custom_id"] for one in bad] == [f"line-{n}" for n in BROKEN]
    answers = {one["custom_id"]: said(one["response"]["body"]) for one in good}
    assert {name: answers[name] for name in expected} == expected
    assert len(set(answers.values())) > LINES // 2
    # The gateway that was killed lost the batch to another one, and nothing was asked for twice.
    assert any(isinstance(one, BatchClaimed) for one in of_batch)
    assert sum(isinstance(one, BatchEnded) for one in of_batch) == 1
    ours = [one for one in of_lines if str(one.request_id).startswith(batch_id)]
    asked = Counter(one.request_id for one in ours if isinstance(one, RequestSubmitted))
    finished = Counter(one.request_id for one in ours if isinstance(one, RequestFinished))
    assert len(asked) == len(finished) == LINES - 4
    assert set(asked.values()) == set(finished.values()) == {1}
    assert not any(isinstance(one, RequestCancel) for one in ours)
    assert all(isinstance(one, BatchEvent) for one in of_batch)
