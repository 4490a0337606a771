"""Who is taken for dead, and who is not: a clock in the hand, beats at will."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from conductor.liveness import Echoes, LeaderLiveness, Loss, WorkerLiveness

SILENT_S = 1.5
HUNG_S = 60.0
BEAT_S = 0.25
WORKER_BEAT_S = 0.5
TICK_S = 1 / 16  # of seconds that add up without a rest


def signs(incarnation: int | None = 7, **changes: Any) -> dict[str, Any]:
    """A worker's beat."""
    meters = {"log": {"unacked": 0}, "sampled_tokens": 0}
    usual = {"state": "ready", "incarnation": incarnation, "steps": 1, "running": 0, "waiting": 0}
    return {**usual, "meters": meters, **changes}


@dataclass
class Conductor:
    """A conductor's ears, and a clock that ticks 16 times a second; its beats come back unless told."""

    lives: dict[int, int] = field(default_factory=lambda: {0: 7})
    hung_s: float = HUNG_S
    now_s: float = 100.0
    ticks: int = 0
    seq: int = 40

    def __post_init__(self) -> None:
        self.echoes = Echoes(gap_s=SILENT_S / 2)
        self.workers = WorkerLiveness(self.echoes, SILENT_S, self.hung_s)
        self.leader = LeaderLiveness(self.echoes, SILENT_S, answer_s=0.5)
        self.echo()

    def echo(self, *, unacked: int = 0, acked: int = 0) -> None:
        self.echoes.receive(self.now_s, unacked=unacked, acked=acked)
        self.workers.set_incarnations(self.lives, self.now_s, self.seq)

    def tick(self) -> None:
        self.now_s += TICK_S
        self.ticks += 1

    def every(self, interval_s: float) -> bool:
        return self.ticks % round(interval_s / TICK_S) == 0

    def listen(
        self,
        seconds: float,
        *,
        beat: Callable[[], dict[str, Any]] | None = None,
        comes_back: bool = True,
        unacked: int = 0,
    ) -> list[Loss]:
        """Let time pass; what is lost by then, without being declared."""
        for _ in range(round(seconds / TICK_S)):
            self.tick()
            if beat is not None and self.every(WORKER_BEAT_S):
                self.workers.receive(0, beat(), self.now_s)
            if comes_back and self.every(BEAT_S):
                self.echo(unacked=unacked)
        return self.workers.lost()

    def stand_still(self, seconds: float) -> None:
        """The conductor's process is stopped, or its loop is busy."""
        self.now_s += seconds


def ranks(losses: Iterable[Loss]) -> list[int]:
    return [loss.rank for loss in losses]


# ---- silence ---------------------------------------------------------------------------------------
def test_a_worker_that_is_not_heard_is_lost_within_two_seconds() -> None:
    conductor = Conductor()
    conductor.listen(3.0, beat=signs)
    assert conductor.listen(SILENT_S - 0.25) == []
    [loss] = conductor.listen(0.25)
    assert (loss.rank, loss.incarnation, loss.reason) == (0, 7, "no heartbeat for 1.5 s")


def test_what_was_stored_once_it_should_have_been_heard_again_it_has_not_read() -> None:
    conductor = Conductor()
    conductor.listen(3.0, beat=signs)
    conductor.listen(0.5)
    conductor.seq = 50  # stored while it may still read
    conductor.listen(0.5)
    conductor.seq = 90
    [loss] = conductor.listen(0.5)
    assert loss.read_seq == 50


def test_one_that_is_heard_is_not() -> None:
    assert Conductor().listen(60.0, beat=signs) == []


def test_a_life_that_was_never_heard_has_the_same_time_from_when_it_was_read() -> None:
    conductor = Conductor(lives={})
    conductor.listen(10.0)
    conductor.lives = {0: 7}  # read by the next echo, 0.25 s later
    assert conductor.listen(SILENT_S) == []
    assert ranks(conductor.listen(0.25)) == [0]


def test_the_beat_of_another_life_is_of_no_use_for_this_one() -> None:
    conductor = Conductor()
    conductor.listen(1.0, beat=signs)
    assert ranks(conductor.listen(2.0, beat=lambda: signs(None, state="loading"))) == [0]


def test_each_rank_is_heard_for_itself() -> None:
    conductor = Conductor(lives={0: 7, 1: 8})
    [loss] = conductor.listen(3.0, beat=signs)
    assert (loss.rank, loss.incarnation) == (1, 8)


def test_what_was_declared_is_not_declared_again_in_the_same_term() -> None:
    conductor = Conductor()
    [loss] = conductor.listen(3.0)
    conductor.workers.declare(loss)
    assert conductor.listen(3.0) == []
    conductor.workers.start_term()  # what a deposed conductor said is void
    assert ranks(conductor.workers.lost()) == [0]


def test_a_life_that_is_over_by_the_log_is_not_declared() -> None:
    conductor = Conductor()
    conductor.lives = {}
    assert conductor.listen(3.0) == []


# ---- our own silence is no one's death -------------------------------------------------------------
def test_nobody_is_lost_while_our_own_beats_do_not_come_back() -> None:
    conductor = Conductor()
    conductor.listen(1.0, beat=signs)
    assert conductor.listen(30.0, comes_back=False) == []
    assert conductor.listen(SILENT_S - 0.25) == []  # and then everybody has the whole time
    assert ranks(conductor.listen(0.5)) == [0]


def test_nobody_is_lost_for_our_having_stood_still() -> None:
    conductor = Conductor()
    conductor.listen(1.0, beat=signs)
    conductor.stand_still(30.0)
    assert conductor.listen(SILENT_S - 0.25) == []
    assert conductor.listen(10.0, beat=signs) == []


def test_nobody_is_lost_while_the_log_takes_nothing() -> None:
    """As in the election of a stream's leader: 4 to 7 s, and workers that were connected there are away."""
    conductor = Conductor()
    conductor.listen(1.0, beat=signs)
    assert conductor.listen(0.75) == []
    assert conductor.listen(7.0, unacked=3) == []
    assert conductor.listen(SILENT_S - 0.25) == []
    assert ranks(conductor.listen(0.5)) == [0]


def test_a_log_that_takes_one_after_another_is_well() -> None:
    conductor = Conductor()
    for acked in range(40):
        conductor.tick()
        conductor.now_s += BEAT_S
        conductor.echo(unacked=5, acked=acked)
    assert ranks(conductor.workers.lost()) == [0]


def test_a_gap_that_was_found_otherwise_gives_the_whole_time_again() -> None:
    conductor = Conductor()
    conductor.listen(SILENT_S - 0.25)
    conductor.echoes.gap()
    assert conductor.listen(SILENT_S - 0.25) == []


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_to_server_log_and_conductor_no_living_worker_is_lost(seed: int) -> None:
    """And one that died is, within 2 s of the time when all is well again."""
    chance = random.Random(seed)
    conductor = Conductor(lives={0: 7, 1: 8})
    is_up, unacked, next_beat_s = True, 0, 0.0
    for _ in range(4_000):
        conductor.tick()
        if chance.random() < 0.01:
            conductor.stand_still(chance.choice([0.2, 1.0, 8.0]))
        if chance.random() < (0.01 if is_up else 0.03):
            is_up = not is_up
        if chance.random() < 0.02:
            unacked = chance.choice([0, 2])
        if is_up and conductor.now_s >= next_beat_s:
            conductor.workers.receive(0, signs(), conductor.now_s)
            next_beat_s = conductor.now_s + WORKER_BEAT_S
        if is_up and conductor.every(BEAT_S):
            conductor.echo(unacked=unacked)
        assert 0 not in ranks(conductor.workers.lost())
    assert 1 in ranks(conductor.listen(2.0, beat=signs))


# ---- heard, and hung -------------------------------------------------------------------------------
def test_a_worker_that_has_work_and_gets_no_further_is_hung() -> None:
    conductor = Conductor()
    assert conductor.listen(HUNG_S - 1, beat=lambda: signs(running=2)) == []
    [loss] = conductor.listen(2.0, beat=lambda: signs(running=2))
    assert loss.reason == "has work, but made no progress for 60.5 s"  # since its first beat


@pytest.mark.parametrize(
    "beat",
    [
        signs(),
        signs(running=2, held=2),
        signs(running=2, held=2, waiting=1),
        signs(running=2, state="loading"),
        signs(running=2, meters={"log": {"unacked": 4}}),
    ],
    ids=["without work", "all held back", "others wait for those", "loading", "waits for the log"],
)
def test_a_worker_that_has_reason_to_stand_still_is_not_hung(beat: dict[str, Any]) -> None:
    assert Conductor().listen(3 * HUNG_S, beat=lambda: beat) == []


@pytest.mark.parametrize("waiting", [{"waiting": 1}, {"running": 2, "held": 1}])
def test_one_of_whom_something_could_run_has_none(waiting: dict[str, int]) -> None:
    conductor = Conductor()
    assert ranks(conductor.listen(HUNG_S + 1, beat=lambda: signs(**waiting))) == [0]


@pytest.mark.parametrize("figure", ["steps", "sampled_tokens", "computed_tokens", "edges"])
def test_whatever_it_counts_of_its_own_doing_is_progress(figure: str) -> None:
    conductor = Conductor()
    count = 0

    def beat() -> dict[str, Any]:
        nonlocal count
        count += 1
        meters: dict[str, Any] = {"sampled_tokens": 1}
        if figure == "steps":
            return signs(running=1, steps=count)
        return signs(running=1, meters=meters | {figure: {"told": count} if figure == "edges" else count})

    assert conductor.listen(3 * HUNG_S, beat=beat) == []


def test_what_others_tell_it_is_none() -> None:
    conductor = Conductor()
    heard = iter(range(1_000))
    beats = conductor.listen(
        HUNG_S + 1, beat=lambda: signs(running=1, meters={"edges": {"heard": next(heard)}})
    )
    assert ranks(beats) == [0]


def test_a_main_loop_that_does_not_turn_is_hung_with_work_or_without() -> None:
    conductor = Conductor()
    assert conductor.listen(5.0, beat=lambda: signs(loop_age_s=HUNG_S - 1)) == []
    [loss] = conductor.listen(1.0, beat=lambda: signs(loop_age_s=HUNG_S))
    assert loss.reason == "its main loop has not run for 60.0 s"


def test_nobody_is_hung_where_that_is_told_so() -> None:
    conductor = Conductor(hung_s=0.0)
    assert conductor.listen(5 * HUNG_S, beat=lambda: signs(running=1, loop_age_s=5 * HUNG_S)) == []


def test_a_worker_is_not_hung_for_a_time_in_which_we_did_not_listen() -> None:
    conductor = Conductor()
    conductor.listen(HUNG_S - 5, beat=lambda: signs(running=1))
    conductor.stand_still(60.0)
    assert conductor.listen(HUNG_S - 5, beat=lambda: signs(running=1)) == []


@pytest.mark.parametrize(
    "beat",
    [
        {},
        {"incarnation": "7"},
        {"incarnation": 7, "meters": 3, "loop_age_s": "long"},
        {"incarnation": 7, "running": "many", "meters": {"log": 1, "edges": [], "tensors": None}},
    ],
)
def test_a_beat_that_says_nonsense_stops_nobody(beat: dict[str, Any]) -> None:
    conductor = Conductor()
    conductor.workers.receive(0, beat, conductor.now_s)
    conductor.workers.receive(9, beat, conductor.now_s)
    assert conductor.workers.lost() == []


# ---- who leads -------------------------------------------------------------------------------------
def leading(epoch: int = 3, **changes: Any) -> dict[str, Any]:
    return {"state": "leading", "epoch": epoch, **changes}


def test_whoever_starts_gives_a_leader_the_time_to_answer() -> None:
    conductor = Conductor()
    conductor.listen(0.25)
    assert conductor.leader.absence() is None
    conductor.listen(0.25)
    assert conductor.leader.absence() == "no heartbeat of a leader for 0.5 s"


def test_without_an_echo_there_was_no_question() -> None:
    conductor = Conductor()
    conductor.listen(10.0, comes_back=False)
    assert conductor.leader.absence() is None
    assert LeaderLiveness(Echoes(1.0), 1.5, 0.5).absence() is None


def test_a_leader_that_was_heard_has_its_whole_time() -> None:
    conductor = Conductor()
    conductor.listen(0.25)
    conductor.leader.receive(leading(), 3, conductor.now_s)
    conductor.listen(SILENT_S - 0.25)
    assert conductor.leader.absence() is None
    conductor.listen(0.25)
    assert conductor.leader.absence() == "no heartbeat of a leader for 1.5 s"


def test_it_is_not_gone_for_our_not_listening() -> None:
    conductor = Conductor()
    conductor.leader.receive(leading(), 3, conductor.now_s)
    conductor.stand_still(30.0)
    conductor.listen(1.0)
    assert conductor.leader.absence() is None


def test_one_that_leaves_in_order_is_gone_at_once() -> None:
    conductor = Conductor()
    conductor.leader.receive(leading(), 3, conductor.now_s)
    conductor.leader.receive(leading(state="leaving", led=True), 3, conductor.now_s)
    assert conductor.leader.absence() == "the leader has left"
    conductor.leader.receive(leading(4), 3, conductor.now_s)  # another took over, and we have not read it yet
    assert conductor.leader.absence() is None


@pytest.mark.parametrize(
    "beat",
    [
        leading(2),
        leading(2, state="leaving", led=True),
        leading(state="leaving", led=False),
        leading(state="following"),
        leading(state="starting"),
        {"state": "leading"},
        {},
    ],
    ids=["deposed", "deposed and leaving", "a follower leaves", "follows", "starts", "no epoch", "none"],
)
def test_whoever_does_not_lead_says_nothing_of_who_does(beat: dict[str, Any]) -> None:
    conductor = Conductor()
    conductor.leader.receive(leading(), 3, conductor.now_s)
    for _ in range(8):
        conductor.leader.receive(beat, 3, conductor.now_s)
        conductor.listen(0.25)
    assert conductor.leader.absence() == "no heartbeat of a leader for 2.0 s"


def test_who_is_known_to_be_alone_need_not_ask() -> None:
    conductor = Conductor()
    conductor.leader.set_absent("there is no other conductor")
    assert conductor.leader.absence() == "there is no other conductor"
    conductor.leader.expect(conductor.now_s)
    assert conductor.leader.absence() is None
