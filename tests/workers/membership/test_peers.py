from shared.events import WorkerJoined, WorkerLeaving, WorkerLost
from workers.membership.peers import Lives, Met, Parted


def joined(id: str, rank: int = 1, incarnation: int | None = None) -> WorkerJoined:
    cards = {"tcp": id.encode()}
    return WorkerJoined(
        id=id, rank=rank, model="m", nodes=[], device="cpu", cards=cards, incarnation=incarnation
    )


def test_a_life_is_met_where_it_is_stored_and_a_copy_is_no_second_life() -> None:
    lives = Lives()

    assert lives.joined(joined("a"), 5) == Met(1, 5, {"tcp": b"a"})
    assert lives.joined(joined("a"), 9) is None
    assert lives.joined(joined("b"), 12) == Met(1, 12, {"tcp": b"b"})
    assert [life.incarnation for life in lives.present.values()] == [12]


def test_a_life_that_says_itself_again_is_the_one_it_names() -> None:
    lives = Lives()

    assert lives.joined(joined("a", incarnation=5), 900) == Met(1, 5, {"tcp": b"a"})
    assert lives.joined(joined("earlier", incarnation=3), 901) is None


def test_a_life_ends_once_and_an_earlier_ones_end_is_not_the_present_ones() -> None:
    lives = Lives()
    lives.joined(joined("a"), 5)
    lives.joined(joined("b"), 8)

    assert lives.over(WorkerLeaving(rank=1, incarnation=5)) is None
    assert lives.over(WorkerLost(rank=1, incarnation=8, reason="")) == Parted(1, 8)
    assert lives.over(WorkerLeaving(rank=1, incarnation=8)) is None
    assert lives.over(WorkerLeaving(rank=2, incarnation=8)) is None
