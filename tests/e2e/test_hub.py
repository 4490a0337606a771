"""A model by its name on a hub, over the real command line: one download, and its commit in the log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.events import RequestAdmitted, WorkerJoined
from tests.dalsegno.hub.fake_hub import FakeHub
from tests.e2e import clients, deploy
from tests.tiny import tiny_checkpoint

REPOSITORY = "tiny/model"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    fake.add(REPOSITORY, tiny_checkpoint(shards=2), modeling_DOT_py=b"raise SystemExit")
    with fake.running():
        yield fake


@pytest.mark.parametrize("in_file", [False, True])
async def test_the_launcher_downloads_once_and_requests_record_the_commit(
    hub: FakeHub, tmp_path: Path, in_file: bool
) -> None:
    (tmp_path / "mine.yaml").write_text(f"model: {REPOSITORY}@v1\n")
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}
    model = str(tmp_path / "mine.yaml") if in_file else f"{REPOSITORY}@v1"

    with deploy.serve(tmp_path, model=model, env=env) as running:
        async with clients.http(running) as http:
            body = clients.body("Hello", "asked", temperature=0, max_tokens=4, ignore_eos=True)
            answer = await http.post("/generate", json=body)
        async with clients.reader(running) as reader:
            _, joined = await reader.until(reader.subjects.worker(0), WorkerJoined)
            events = await reader.events("asked")

    assert answer.status_code == 200
    revision = f"{REPOSITORY}@{hub.commit(REPOSITORY)}"
    assert joined.revision == revision
    assert [event.revisions for event in events if isinstance(event, RequestAdmitted)] == [[revision]]
    assert len(hub.paths("GET", "/revision/")) == 1
    assert len(hub.paths("GET", "/cdn/")) == 2
    assert not [path for path in hub.paths("GET") if path.endswith(".py")]
