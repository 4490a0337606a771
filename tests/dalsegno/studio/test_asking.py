"""Forks of recorded requests: what will be asked, and that nothing is submitted without permission."""

from dataclasses import dataclass, field

import pytest

from dalsegno.history.log_source import LogSource
from dalsegno.replay import recorded_request
from dalsegno.studio.asking import Asker, Fork, fork_of
from shared.errors import ClientError
from shared.events import RequestSubmitted
from tests.dalsegno.studio.pages import CHANGE, HISTORIES, visitor

PLAIN = HISTORIES / "plain.bundle"


@dataclass(frozen=True)
class NotingAsker(Asker):
    """Submits nothing, and notes what it was asked."""

    where: LogSource = field(default_factory=LogSource)
    asked: list[RequestSubmitted] = field(default_factory=list)

    async def ask(self, wanted: Fork) -> str:
        self.asked.append(wanted.event)
        return str(wanted.event.request_id)


def plain_fork(*changes: str, seq: int | None = None) -> Fork:
    return fork_of(recorded_request.of_bundle(str(PLAIN)), "plain", seq, changes)


def test_a_fork_names_each_changed_value() -> None:
    found = plain_fork("temperature=0.7", 'text="What does len do?"')
    differing = {name: becomes for name, _, becomes in found.differences}
    assert differing["params.temperature"] == 0.7
    assert differing["inputs.text"] == "What does len do?"
    assert {name.partition(".")[0] for name in differing} == {"params", "inputs"}
    assert found.kept_tokens == 0


def test_without_changes_nothing_differs_from_the_submission() -> None:
    assert plain_fork().differences == []


def test_from_the_middle_of_an_answer_its_tokens_are_kept() -> None:
    history = recorded_request.of_bundle(str(PLAIN))
    last = history.records[-2].seq
    found = fork_of(history, "plain", last, [])
    assert found.kept_tokens > 0
    assert "inputs.token_ids" in {name for name, _, _ in found.differences}


@pytest.mark.parametrize(
    ("changes", "seq", "says"),
    [
        (["nonsense"], None, "expected key=value"),
        (["temprature=1"], None, "no such key"),
        (["temperature=-1"], None, ">= 0"),
        ([], 10**9, "record"),
    ],
)
def test_a_wrong_fork_is_one_sentence(changes: list[str], seq: int | None, says: str) -> None:
    with pytest.raises(ClientError, match=says):
        plain_fork(*changes, seq=seq)


async def test_a_studio_that_only_reads_shows_forks_and_submits_none() -> None:
    one = await visitor(PLAIN)
    about = {"source": "b1", "id": "plain", "set": "temperature=0.7"}
    assert (await one.get("/api/sources"))["can_ask"] is False
    [differing] = (await one.get("/api/fork", **about))["differences"]
    assert differing["field"] == "params.temperature"
    refused = await one.http.post("/api/fork", params=about, headers=CHANGE)
    assert refused.status_code == 400
    assert "--allow-ask" in refused.json()["error"]


async def test_with_permission_a_fork_is_submitted_once_and_only_by_pages_of_the_studio() -> None:
    asker = NotingAsker()
    one = await visitor(PLAIN, asker=asker)
    about = {"source": "b1", "id": "plain", "set": "temperature=0.7"}
    assert (await one.get("/api/sources"))["can_ask"] is True
    await one.get("/api/fork", **about)
    for headers in ({}, {"origin": CHANGE["origin"]}, CHANGE | {"origin": "http://example.com"}):
        assert (await one.http.post("/api/fork", params=about, headers=headers)).status_code == 403
    assert asker.asked == []

    answer = await one.http.post("/api/fork", params=about, headers=CHANGE)

    [event] = asker.asked
    assert answer.json() == {"request_id": event.request_id}
    assert event.params.temperature == 0.7
    assert event.forked_from is not None
    assert event.forked_from.request_id == "plain"
