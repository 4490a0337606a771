"""The owner of a reader, and the readers that a key has beyond its limit."""

from shared.log.nats.api import ConsumerConfig, ListedConsumer
from shared.log.nats.reader_limit import UNATTENDED, excess, owner_of


def consumer(
    name: str, deliver_subject: str, created: str = "2026-11-22T10:00:00Z", *, bound: bool = True
) -> ListedConsumer:
    return ListedConsumer(name, created, ConsumerConfig(deliver_subject), bound)


def test_a_reader_belongs_to_the_key_whose_inbox_it_delivers_to() -> None:
    assert owner_of(consumer("x", "_INBOX_UABC.one.two")) == "_INBOX_UABC"


def test_a_reader_without_a_subscriber_belongs_to_no_key_whatever_its_subject_says() -> None:
    assert owner_of(consumer("conductor-1", "_INBOX_conductor.1", bound=False)) == UNATTENDED
    assert owner_of(consumer("pull", "", bound=False)) == UNATTENDED


def test_roles_that_share_an_inbox_are_told_apart_by_name_and_others_are_one_owner() -> None:
    names = ["conductor-1", "gateway-1", "worker-1", "ZvXk", "ZvXl", "made-up-1"]
    owners = [owner_of(consumer(name, f"_INBOX.{name}")) for name in names]
    assert owners == ["_INBOX/conductor", "_INBOX/gateway", "_INBOX/worker", "_INBOX", "_INBOX", "_INBOX"]


def test_a_name_gives_a_key_no_second_limit() -> None:
    assert owner_of(consumer("conductor-1", "_INBOX_UABC.x")) == owner_of(consumer("y", "_INBOX_UABC.y"))


def test_the_newest_readers_of_a_greedy_key_are_beyond_its_limit_and_no_other_keys() -> None:
    found = [consumer(f"r{n}", f"_INBOX_R.{n}", f"2026-11-22T10:00:0{n}Z") for n in (3, 1, 4, 2)]
    found += [consumer(f"c{n}", f"_INBOX_C.{n}") for n in range(2)]
    assert excess(found, 2) == {"_INBOX_R": ["r3", "r4"]}
    assert excess(found, 4) == {}
