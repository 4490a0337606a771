"""`dalsegno replay` finds every change of the log or of the plan.

The records of a real request are written into a bundle: unchanged, with one dropped, or with one mutated.
Each
time the digests are computed anew, as a forger would.
"""

import shutil
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from dalsegno.bundle import bundle_file, export
from shared.events import MalformedEventError, RequestFinished, decode
from shared.log.port import StoredRecord
from tests.dalsegno import histories
from tests.e2e import clients
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running

REQUEST: Final = "replayed"
Change = Callable[[dict[str, Any]], object]

MUTATIONS: Final[dict[str, tuple[str, int, Change]]] = {
    "the question": ("request.submitted.v1", 0, lambda e: e["inputs"].update(text="What does abs do?")),
    "the seed": ("request.admitted.v1", 0, lambda e: e.update(seed=e["seed"] + 1)),
    "an order's limit": ("node.ready.v1", 1, lambda e: e["walks"][0]["args"].update(max_tokens=5)),
    "an order's history": ("node.ready.v1", 0, lambda e: e.update(history=b"\0" * 16)),
    "the prompt's length": (
        "walk.completed.v1",
        0,
        lambda e: e["results"][0]["facts"].update(prompt_tokens=1),
    ),
    "how long it took": ("walk.completed.v1", 1, lambda e: e["durations_s"].update(decode=1e-9)),
    "a word of the answer": ("output.chunk.v1", 0, lambda e: e.update(text="Forget")),
    "a token of the answer": ("output.chunk.v1", 0, lambda e: e["token_ids"].append(1)),
    "the usage": ("request.finished.v1", 0, lambda e: e["usage"].update(completion_tokens=1)),
    "the reason to end": ("request.finished.v1", 0, lambda e: e.update(finish_reasons=["length"])),
    "the epoch": ("request.finished.v1", 0, lambda e: e.update(epoch=e["epoch"] + 1)),
}
DROPS: Final = (
    ("request.submitted.v1", 0),
    ("request.admitted.v1", 0),
    ("node.ready.v1", 0),
    ("walk.completed.v1", 0),
    ("node.ready.v1", 1),
    ("output.chunk.v1", 0),
    ("output.chunk.v1", 1),
    ("walk.completed.v1", 1),
    ("request.finished.v1", 0),
)


@pytest.fixture
async def records(deployment: Running) -> list[StoredRecord]:
    """The records that a replay of one request reads, up to its end."""
    async with clients.reader(deployment) as reader:
        async with clients.http(deployment) as http:  # asked once: the same id attaches to its answer
            await clients.generate(http, Answer(REQUEST), "What does len do?", temperature=0, max_tokens=32)
        end, _ = await reader.until(reader.subjects.walk(REQUEST), RequestFinished)
        wanted = reader.subjects.replayed(REQUEST)
        async with aclosing(reader.log.history(wanted, 1, end)) as history:
            return [record async for record in history]


class Copy:
    """A bundle with records that differ from its log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, records: list[StoredRecord]) -> None:
        found = export.bundled(histories.collected(records, REQUEST), payloads=True, redact=False)
        with self._path.open("wb") as file:
            bundle_file.write(file, *found)

    def replay(self, *args: str, **told: Any) -> clients.Ended:
        return clients.run("replay", str(self._path), *args, **told)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "copy.bundle")


def place_of(records: list[StoredRecord], kind: str, number: int) -> int:
    """The position of the n-th event of a kind among the request's records."""
    places = [
        place
        for place, record in enumerate(records)
        if REQUEST in record.subject.split(".") and wire(record).get("type", "request.submitted.v1") == kind
    ]
    return places[number]


def wire(record: StoredRecord) -> dict[str, Any]:
    event: dict[str, Any] = msgpack.unpackb(record.data)
    return event


def refused_with(ended: clients.Ended, *said: str) -> None:
    assert ended.returncode == 1, ended.stdout
    assert not ended.stderr or "Traceback" not in ended.stderr
    for words in said:
        assert words in ended.stdout + ended.stderr


async def test_a_faithful_copy_matches(records: list[StoredRecord], copy: Copy) -> None:
    copy.write(records)
    ended = copy.replay()
    assert ended.returncode == 0, ended.stdout
    assert f"{REQUEST}: finished: all 3 decisions match" in ended.stdout


@pytest.mark.parametrize(("kind", "number"), DROPS)
async def test_a_dropped_event_fails(kind: str, number: int, records: list[StoredRecord], copy: Copy) -> None:
    del records[place_of(records, kind, number)]
    copy.write(records)
    refused_with(copy.replay())


@pytest.mark.parametrize("what", MUTATIONS)
async def test_a_mutated_event_fails(what: str, records: list[StoredRecord], copy: Copy) -> None:
    kind, number, change = MUTATIONS[what]
    place = place_of(records, kind, number)
    record, event = records[place], wire(records[place])
    change(event)
    assert event != wire(record)
    records[place] = StoredRecord(record.seq, record.subject, msgpack.packb(event), record.time_ns)
    copy.write(records)
    refused_with(copy.replay())


async def test_a_mismatch_shows_what_was_expected_what_is_recorded_and_the_state_before(
    records: list[StoredRecord], copy: Copy
) -> None:
    place = place_of(records, "request.finished.v1", 0)
    record, event = records[place], wire(records[place])
    true = event["usage"]["completion_tokens"]
    event["usage"]["completion_tokens"] = 1
    records[place] = StoredRecord(record.seq, record.subject, msgpack.packb(event), record.time_ns)
    copy.write(records)
    refused_with(
        copy.replay(),
        f"{REQUEST}: 2 decisions match, then",
        f"at: record {record.seq}",
        "differs: usage",
        f'"completion_tokens": {true}',
        "expected: {",
        "recorded: {",
        'state before: {"phase": "finished"',  # decided, and not in the log yet
    )
    found = clients.verdicts(copy.replay("--json"))[REQUEST]
    assert not found["matches"]
    assert found["mismatch"]["seq"] == record.seq
    assert found["mismatch"]["expected"]["usage"]["completion_tokens"] == true
    assert found["mismatch"]["recorded"]["usage"]["completion_tokens"] == 1
    assert found["mismatch"]["state_before"]["expected"] == [f"{REQUEST}.end"]


async def test_a_changed_plan_fails_and_its_digest_is_named_first(
    records: list[StoredRecord], copy: Copy, tmp_path: Path
) -> None:
    """The same log with an edited plan, as after an upgrade."""
    shutil.copytree(
        clients.ROOT / "models", tmp_path / "models", ignore=shutil.ignore_patterns("__pycache__")
    )
    plan = tmp_path / "models" / "decoder_lm" / "graph.py"
    before = plan.read_text()
    after = before.replace("ignore_eos=request.params.ignore_eos", "ignore_eos=True")
    assert after != before
    plan.write_text(after)
    copy.write(records)
    ended = copy.replay(env={"PYTHONPATH": f"{tmp_path}:{clients.ROOT}"}, cwd=tmp_path, as_program=True)
    refused_with(
        ended,
        f"{REQUEST}: 1 decision matches, then",
        "differs: walks",
        "expected: {",
        "recorded: {",
        'state before: {"phase": "running"',
        '"steps_done": 1',
    )
    notes = [line for line in ended.stdout.splitlines() if f"{REQUEST}: note: " in line]
    assert "digest of plan was" in notes[0]
    assert not any("digest of core" in line for line in notes)


async def test_a_request_that_is_not_there_is_no_match(records: list[StoredRecord], copy: Copy) -> None:
    copy.write([record for record in records if not mentions(record)])
    refused_with(copy.replay(), "cannot be replayed: its records contain no submission")


def mentions(record: StoredRecord) -> bool:
    try:
        return decode(record.data).request_id == REQUEST
    except MalformedEventError:
        return False
