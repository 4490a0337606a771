from shared.events import WorkerJoined, WorkerLeaving, WorkerLost
from workers.membership.peers import PeerIncarnations, PeerJoined, PeerLeft


def joined(id: str, rank: int = 1, incarnation: int | None = None) -> WorkerJoined:
    cards = {"tcp": id.encode()}
    return WorkerJoined(
        id=id, rank=rank, model="m", nodes=[], device="cpu", cards=cards, incarnation=incarnation
    )


def test_an_incarnation_begins_where_it_is_stored_and_a_copy_starts_no_second_one() -> None:
    peers = PeerIncarnations()

    assert peers.joined(joined("a"), 5) == PeerJoined(1, 5, {"tcp": b"a"})
    assert peers.joined(joined("a"), 9) is None
    assert peers.joined(joined("b"), 12) == PeerJoined(1, 12, {"tcp": b"b"})
    assert [peer.incarnation for peer in peers.current.values()] == [12]


def test_a_repeated_event_belongs_to_the_incarnation_it_names() -> None:
    peers = PeerIncarnations()

    assert peers.joined(joined("a", incarnation=5), 900) == PeerJoined(1, 5, {"tcp": b"a"})
    assert peers.joined(joined("earlier", incarnation=3), 901) is None


def test_an_incarnation_ends_once_and_the_end_of_an_earlier_one_does_not_end_the_current_one() -> None:
    peers = PeerIncarnations()
    peers.joined(joined("a"), 5)
    peers.joined(joined("b"), 8)

    assert peers.ended(WorkerLeaving(rank=1, incarnation=5)) is None
    assert peers.ended(WorkerLost(rank=1, incarnation=8, reason="")) == PeerLeft(1, 8)
    assert peers.ended(WorkerLeaving(rank=1, incarnation=8)) is None
    assert peers.ended(WorkerLeaving(rank=2, incarnation=8)) is None
