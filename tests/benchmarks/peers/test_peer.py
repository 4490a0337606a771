"""A peer's process: what it says counts, what it prints does not; asleep, nothing of it runs."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.peers.peer import Peer, PeerFailedError, _state, _tree
from benchmarks.peers.protocol import Answer

pytestmark = pytest.mark.processes


Make = Callable[[str], Peer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Peer] = []

    def peer(behaviour: str) -> Peer:
        (tmp_path / "behaviour").write_text(behaviour)
        command = (sys.executable, "-m", "tests.benchmarks.peers.fake", str(tmp_path))
        made.append(Peer("fake", command, tmp_path / "said.txt"))
        return made[-1]

    yield peer
    for one in made:
        one.stop()


def test_a_peer_tells_how_it_was_started_and_when_each_token_came(make: Make) -> None:
    peer = make("well")
    peer.start()

    assert peer.ready_s > 0
    assert peer.how.startswith("fake ")
    assert peer.versions == {"msgspec": version("msgspec")}
    assert peer.ask([[1, 2], [3]], 2) == [Answer([0.001, 0.002], [300, 300])] * 2


def test_no_peer_sees_a_gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    peer = make("well")
    peer.start()

    seen = Path(f"/proc/{peer._running.pid}/environ").read_text().split("\0")
    assert "CUDA_VISIBLE_DEVICES=" in seen


def test_what_a_library_prints_is_kept_and_is_not_taken_for_an_answer(make: Make) -> None:
    peer = make("well")
    peer.start()

    assert peer.said.read_text() == "a library has something to say\n"
    assert peer.ask([[1]], 1) == [Answer([0.001], [300])]


def test_every_process_of_a_peer_is_stopped_while_it_sleeps_and_answers_once_it_is_woken(make: Make) -> None:
    peer = make("well")
    peer.start()
    pids = _tree(peer._running.pid)
    peer.sleep()

    assert len(pids) == 2  # it and the one it started
    assert {_state(pid) for pid in pids} == {"T"}

    peer.wake()
    assert peer.ask([[1]], 1) == [Answer([0.001], [300])]


def test_a_peer_that_sleeps_can_be_stopped_and_leaves_nothing_behind(make: Make) -> None:
    peer = make("well")
    peer.start()
    pids = _tree(peer._running.pid)
    peer.sleep()
    peer.stop()

    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("no answer", "ValueError: this prompt is too much"),
        ("short answer", r"expected 1 answers of 2 tokens, found these lengths: \[1\]"),
        ("sudden end", "it ended with 9"),
    ],
)
def test_a_peer_that_fails_when_it_is_asked_says_why(make: Make, behaviour: str, said: str) -> None:
    peer = make(behaviour)
    peer.start()

    with pytest.raises(PeerFailedError, match=said):
        peer.ask([[1]], 2)


def test_a_peer_that_does_not_start_says_why(make: Make) -> None:
    with pytest.raises(PeerFailedError, match="MemoryError: no room for the weights"):
        make("no start").start()
