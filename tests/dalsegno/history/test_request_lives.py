"""The processes that affected a request: those of its ranks, and conductors, while it was open."""

from dalsegno.history.request_lives import RequestLives
from shared.events import NodeReady, decode
from tests.conductor.script import SUBJECTS, Script


def shown(script: Script) -> list[str]:
    """The types of the shown records."""
    lives = RequestLives(SUBJECTS)
    found = [record for record in script.records if _concerns(record.subject) and lives.shows(record)]
    return [type(decode(record.data)).__name__ for record in found]


def _concerns(subject: str) -> bool:
    address = SUBJECTS.parse(subject)
    return address is not None and (address.is_membership or address.request_id == "r1")


def test_what_happened_before_and_after_it_is_not_shown() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.run_to_the_end()
    script.lose(0)
    script.join("w0-b")

    assert {"EpochOpened", "WorkerJoined", "WorkerLost"}.isdisjoint(shown(script))
    assert shown(script)[-1] == "RequestFinished"


def test_the_loss_and_the_return_of_its_rank_are_shown() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.complete(script.last(NodeReady))
    script.lose(0)
    script.join("w0-b")
    script.run_to_the_end()

    assert [name for name in shown(script) if name.startswith("Worker")] == ["WorkerLost", "WorkerJoined"]


def test_another_rank_is_not_shown_but_a_new_leader_is() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.join("w7-a", rank=7)
    script.open_epoch(2, "c2")

    assert [name for name in shown(script) if name in {"WorkerJoined", "EpochOpened"}] == ["EpochOpened"]


def test_a_request_that_waits_for_a_rank_shows_it() -> None:
    script = Script()
    script.open_epoch()
    script.submit()
    script.join()

    assert "WorkerJoined" in shown(script)
