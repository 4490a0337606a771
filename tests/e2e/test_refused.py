"""Requests that a gateway refused are in the log, by code and tenant, and survive their gateway."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, Final

import httpx
import pytest

from shared.events import RequestsRefused
from shared.subject_rules import read_event
from shared.subjects import Subjects
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running

KEYS: Final = {"alice": "sk-alice-xyzzy", "bob": "sk-bob-xyzzy"}
CHAT: Final[dict[str, Any]] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What does len do?"}],
    "max_tokens": 4,
}
PATH: Final = "/v1/chat/completions"
PER_MINUTE: Final = 12


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = ",".join(f"{name}={secret}" for name, secret in KEYS.items())
    env = {
        "DALSEGNO_GATEWAY_API_KEYS": keys,
        "DALSEGNO_GATEWAY_MAX_BODY_BYTES": "10000",
        "DALSEGNO_GATEWAY_REQUESTS_PER_MINUTE": str(PER_MINUTE),
    }
    with deploy.serve(tmp_path_factory.mktemp("refused"), env=env) as running:
        yield running


def ask(running: Running, tenant: str, **request: Any) -> httpx.Response:
    secret = KEYS.get(tenant, "sk-nobody-xyzzy")
    headers = {"Authorization": f"Bearer {secret}"} | request.pop("headers", {})
    return httpx.post(f"{running.url}{PATH}", headers=headers, timeout=60, **request)


async def until_counted(running: Running, count: int) -> None:
    """Wait until the log tells of so many refused requests."""
    subjects, found = Subjects(running.prefix), 0
    async with (
        clients.log_of(running, running.reader) as log,
        aclosing(log.read([subjects.refused("*")], 1)) as records,
    ):
        while found < count:
            _, event = read_event(await anext(records), subjects)
            assert isinstance(event, RequestsRefused)
            found += sum(one.count for one in event.counts)
    assert found == count


def listed(running: Running, *arguments: str) -> list[dict[str, Any]]:
    ended = clients.run_on(running, "log", "--refused", "--json", "--limit", "100", *arguments)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


async def test_refusals_of_each_kind_are_listed_with_code_and_tenant(running: Running) -> None:
    text = {"content-type": "text/plain"}
    assert ask(running, "alice", json=CHAT | {"request_id": "answered"}).status_code == 200
    too_long = CHAT | {"messages": [{"role": "user", "content": "len " * 2000}], "request_id": "rejected"}
    assert ask(running, "alice", json=too_long).status_code == 400  # by the conductor or worker, on the log
    told = [
        ask(running, "alice", json=CHAT | {"model": KEYS["alice"]}, headers={"X-Request-ID": "from-alice"}),
        ask(running, "alice", json=CHAT | {"temperature": -1, "request_id": "wrong-1"}),
        ask(running, "alice", content="{}", headers=text),
        ask(running, "bob", content="x" * 20_000, headers={"content-type": "application/json"}),
        ask(running, "bob", json=CHAT | {"request_id": "answered", "max_tokens": 5}),
        ask(running, "nobody", json=CHAT),
    ]
    limited = [ask(running, "bob", json=CHAT | {"model": "other"}).status_code for _ in range(PER_MINUTE)]
    count = len(told) + len(limited)
    await until_counted(running, count)
    lines = listed(running)

    counts = {
        (one["status"], one["code"], one["tenant"]): one["count"] for one in lines if one["kind"] == "count"
    }
    assert counts == {
        (404, "model_not_found", "alice"): 1,
        (400, "invalid_value", "alice"): 1,
        (415, "unsupported_media_type", "alice"): 1,
        (413, "body_too_large", "bob"): 1,
        (409, "request_id_conflict", "bob"): 1,
        (401, "invalid_api_key", None): 1,
        (404, "model_not_found", "bob"): limited.count(404),
        (429, "rate_limit_exceeded", "bob"): limited.count(429),
    }
    assert limited.count(429) > 0
    samples = [one for one in lines if one["kind"] == "sample"]
    times = [one["time"] for one in samples]
    assert times == sorted(times, reverse=True)
    by_name = {one[name]: one for name in ("correlation", "request_id") for one in samples}
    for answer in told:
        found, error = by_name[answer.headers["x-request-id"]], answer.json()["error"]
        assert (found["code"], found["status"], found["param"]) == (
            error["code"],
            answer.status_code,
            error["param"],
        )
        assert found["route"] == f"POST {PATH}"
    [found] = listed(running, "wrong-1")
    assert (found["code"], found["tenant"], found["param"]) == ("invalid_value", "alice", "temperature")
    assert listed(running, "from-alice")[0]["code"] == "model_not_found"
    assert "xyzzy" not in json.dumps(lines)


async def test_a_killed_gateway_leaves_what_it_had_stored(running: Running) -> None:
    before = sum(one["count"] for one in listed(running) if one["kind"] == "count")
    for _ in range(3):
        ask(running, "nobody", json=CHAT)
    await until_counted(running, before + 3)
    [gateway] = running.pids.gateway
    os.kill(gateway, signal.SIGKILL)
    while True:  # its successor has the same address
        try:
            assert ask(running, "nobody", json=CHAT).status_code == 401
            break
        except httpx.TransportError:
            continue
    await until_counted(running, before + 4)
    writers = {one["gateway"] for one in listed(running) if one["kind"] == "sample"}
    assert len(writers) == 2


def test_the_log_is_replayed_and_verified_as_without_them(running: Running) -> None:
    replayed = clients.run_on(running, "replay", "--all", "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    verified = clients.run_on(running, "verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_what_was_refused_last_is_stored_when_the_deployment_ends(running: Running) -> None:
    before = sum(one["count"] for one in listed(running) if one["kind"] == "count")
    assert ask(running, "nobody", json=CHAT, headers={"X-Request-ID": "the-last"}).status_code == 401
    running.stop()
    ended = clients.run("log", "--refused", "--json", "--data-dir", str(running.data_dir))
    lines = [json.loads(line) for line in ended.stdout.splitlines()]

    assert sum(one["count"] for one in lines if one["kind"] == "count") == before + 1
    assert next(one["correlation"] for one in lines if one["kind"] == "sample") == "the-last"
