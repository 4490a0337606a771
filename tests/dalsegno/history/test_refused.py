"""`dalsegno log --refused`: exact counts, the newest samples, and nothing that is not a gateway's."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import click
import pytest
from click.testing import CliRunner

from dalsegno.history import command, log_source, refused
from dalsegno.history.log_source import LogSource
from shared.errors import ClientError
from shared.events import Refusal, RefusalCount, RequestsRefused, encode
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import Log
from shared.subjects import Subjects

SUBJECTS = Subjects()
S = 1_000_000_000


def told(name: str, number: int, *refusals: Refusal, without: int = 0) -> RequestsRefused:
    """An event of gateway `name`: each refusal is a sample, and `without` more of the first have none."""
    counts = [
        RefusalCount(code=one.code, status=one.status, tenant=one.tenant, count=1 + (0 if place else without))
        for place, one in enumerate(refusals)
    ]
    return RequestsRefused(
        id=f"{name}.refused.{number}", writer=name, since_ns=1, counts=counts, samples=list(refusals)
    )


LIMITED = Refusal(
    time_ns=3 * S, code="rate_limit_exceeded", status=429, tenant="alice", route="POST /generate",
    message="alice may send 3", correlation="from-alice",
)  # fmt: skip
UNKNOWN = Refusal(
    time_ns=2 * S, code="model_not_found", status=404, tenant="bob", route="POST /v1/completions",
    message="the model 'x' does not exist\x1b[2J", param="model", request_id="r-2", correlation="req-2",
)  # fmt: skip
KEYLESS = Refusal(time_ns=1 * S, code="missing_api_key", status=401, message="send one", correlation="req-1")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore(SUBJECTS)

    @asynccontextmanager
    async def opened(_: LogSource) -> AsyncGenerator[tuple[Log, Subjects], None]:
        yield MemoryLog(store), SUBJECTS

    monkeypatch.setattr(log_source, "open_log", opened)
    return store


@pytest.fixture
def filled(store: MemoryStore) -> MemoryStore:
    first = told("g-1", 1, KEYLESS, UNKNOWN, without=9998)
    for event in (first, told("g-2", 1, LIMITED, without=4), first):  # the last one was sent twice
        store.append(SUBJECTS.refused(event.writer), encode(event))
    return store


async def test_counts_are_added_up_over_gateways_and_each_event_counts_once(filled: MemoryStore) -> None:
    found = await refused.read(MemoryLog(filled), SUBJECTS)
    assert found.counts == {
        (401, "missing_api_key", None): 9999,
        (404, "model_not_found", "bob"): 1,
        (429, "rate_limit_exceeded", "alice"): 5,
    }
    assert found.sampled.total() == 3


async def test_what_is_no_gateways_event_counts_nothing(store: MemoryStore) -> None:
    event = told("g-1", 1, KEYLESS)
    store.append(SUBJECTS.refused("g-9"), encode(event))  # by the name of another
    store.append(SUBJECTS.refused("g-1"), b"junk")
    store.append(SUBJECTS.request("r1"), encode(event))
    store.append(SUBJECTS.control("r1"), encode(event))
    store.append(SUBJECTS.output("g-1", "r1", "w0"), encode(event))
    assert not (await refused.read(MemoryLog(store), SUBJECTS)).counts


def shown(*arguments: str) -> list[str]:
    result = CliRunner().invoke(command.log, ["--refused", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.usefixtures("filled")
def test_the_listing_has_the_counts_and_the_newest_samples_first() -> None:
    lines = shown()
    head, *counts = lines[:4]
    assert head.split() == ["REFUSED", "WITHOUT", "SAMPLE", "STATUS", "CODE", "TENANT"]
    assert [line.split() for line in counts] == [
        ["9999", "9998", "401", "missing_api_key", "-"],
        ["5", "4", "429", "rate_limit_exceeded", "alice"],
        ["1", "0", "404", "model_not_found", "bob"],
    ]
    assert [line.split()[:3] for line in lines[6:]] == [
        ["1970-01-01T00:00:03.000Z", "from-alice", "429"],
        ["1970-01-01T00:00:02.000Z", "r-2", "404"],
        ["1970-01-01T00:00:01.000Z", "req-1", "401"],
    ]
    assert all(line.isprintable() for line in lines)


@pytest.mark.usefixtures("filled")
def test_the_limit_is_of_samples_and_counts_stay_whole() -> None:
    lines = [json.loads(line) for line in shown("--limit", "1", "--json")]
    counts = [line for line in lines if line["kind"] == "count"]
    [sample] = [line for line in lines if line["kind"] == "sample"]
    assert sum(one["count"] for one in counts) == 10_005
    assert sum(one["without_sample"] for one in counts) == 10_002
    assert sample == {
        "kind": "sample", "time": "1970-01-01T00:00:03.000Z", "request_id": None, "correlation": "from-alice",
        "status": 429, "code": "rate_limit_exceeded", "tenant": "alice", "route": "POST /generate",
        "param": None, "message": "alice may send 3", "gateway": "g-2",
    }  # fmt: skip


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("name", "code"), [("r-2", "model_not_found"), ("from-alice", "rate_limit_exceeded")]
)
def test_one_request_is_found_by_either_of_its_names(name: str, code: str) -> None:
    [line] = [json.loads(line) for line in shown(name, "--json")]
    assert line["code"] == code


@pytest.mark.usefixtures("filled")
async def test_a_request_without_a_sample_says_how_many_have_none() -> None:
    with pytest.raises(ClientError, match="of 10005 refused requests 3 are samples"):
        await refused.show(LogSource(), "r-9", 20, as_json=False)


@pytest.mark.usefixtures("store")
def test_a_log_without_refusals_says_so() -> None:
    assert shown() == ["no refused requests in this log"]
    assert shown("--json") == []


def test_refusals_are_not_followed() -> None:
    result = CliRunner().invoke(command.log, ["--refused", "--follow"])
    assert result.exit_code == click.UsageError.exit_code
    assert "leave --follow out" in result.output
