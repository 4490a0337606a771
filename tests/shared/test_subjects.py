"""Every built subject can be parsed, and no other can."""

import pytest

from shared.ids import Rank, RequestId
from shared.subjects import Address, Subjects

SUBJECTS = Subjects("ds")
R1 = RequestId("r1")


@pytest.mark.parametrize(
    ("subject", "address"),
    [
        (SUBJECTS.request("r1"), Address(kind="request", request_id=R1)),
        (SUBJECTS.control("r1"), Address(kind="control", request_id=R1)),
        (SUBJECTS.walk("r1"), Address(kind="walk", request_id=R1)),
        (SUBJECTS.ready(3, "r1"), Address(kind="ready", request_id=R1, rank=Rank(3))),
        (SUBJECTS.done(3, "r1"), Address(kind="done", request_id=R1, rank=Rank(3))),
        (SUBJECTS.worker(3), Address(kind="worker", rank=Rank(3))),
        (SUBJECTS.epoch, Address(kind="conductor", name="epoch")),
        (SUBJECTS.refused("g-1"), Address(kind="refused", name="g-1")),
        (SUBJECTS.output("g", "r1", "w0"), Address(kind="output", origin="g", request_id=R1, writer="w0")),
    ],
)
def test_what_is_built_is_parsed(subject: str, address: Address) -> None:
    assert SUBJECTS.parse(subject) == address


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "ds",
        "ds.request",
        "ds.request.a.b",
        "xx.request.r1",
        "ds.ready.one.r1",
        "ds.worker.x",
        "ds.output.g.r1",
        "ds.nothing.r1",
        "ds.walk.r1.x.y.z",
        "ds.worker.-1",
        "ds.worker.00",
        "ds.done.01.r1",
        "ds.ready.\u0663.r1",
        "ds.edge.0.+1.r1",
    ],
)
def test_what_is_not_ours_is_no_address(subject: str) -> None:
    assert SUBJECTS.parse(subject) is None


def matches(pattern: str, subject: str) -> bool:
    """NATS' rule: `*` is one token, `>` is one or more remaining tokens."""
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(found) >= len(wanted) and all(
            w in {"*", f} for w, f in zip(wanted[:-1], found, strict=False)
        )
    return len(wanted) == len(found) and all(w in {"*", f} for w, f in zip(wanted, found, strict=True))


def test_every_subject_that_is_written_is_in_the_stream() -> None:
    written = [
        SUBJECTS.request("r"),
        SUBJECTS.control("r"),
        SUBJECTS.walk("r"),
        SUBJECTS.ready(0, "r"),
        SUBJECTS.done(0, "r"),
        SUBJECTS.worker(0),
        SUBJECTS.epoch,
        SUBJECTS.refused("g-1"),
        SUBJECTS.output("g", "r", "w0"),
    ]
    assert all(any(matches(p, subject) for p in SUBJECTS.logged()) for subject in written)
    assert not any(matches(p, SUBJECTS.heartbeat("worker", "0")) for p in SUBJECTS.logged())


def test_who_reads_outputs_reads_epochs_too() -> None:
    """Otherwise two readers could disagree on the valid fences (ADR 3)."""
    for wanted in (SUBJECTS.for_gateway("g"), SUBJECTS.for_conductor(), SUBJECTS.replayed("r")):
        assert any(matches(pattern, SUBJECTS.epoch) for pattern in wanted)


def test_no_role_reads_what_gateways_refused() -> None:
    for wanted in (SUBJECTS.for_gateway("g"), SUBJECTS.for_conductor(), SUBJECTS.for_worker(0)):
        assert not any(matches(pattern, SUBJECTS.refused("g")) for pattern in wanted)


def test_a_worker_reads_its_own_orders_and_nobody_elses() -> None:
    wanted = SUBJECTS.for_worker(0)
    assert any(matches(p, SUBJECTS.ready(0, "r")) for p in wanted)
    assert not any(matches(p, SUBJECTS.ready(1, "r")) for p in wanted)
    assert any(matches(p, SUBJECTS.edge(0, 1, "r")) for p in wanted)
    assert not any(matches(p, SUBJECTS.edge(1, 0, "r")) for p in wanted)


def test_a_worker_learns_of_every_life_and_of_every_end() -> None:
    """A worker reads tensors of other incarnations; a request's end frees its own."""
    wanted = SUBJECTS.for_worker(0)
    for subject in (SUBJECTS.worker(3), SUBJECTS.walk("r"), SUBJECTS.epoch):
        assert any(matches(p, subject) for p in wanted)


def test_an_edge_says_whom_it_is_for_and_whom_it_is_from() -> None:
    address = SUBJECTS.parse(SUBJECTS.edge(2, 0, "r"))
    assert address is not None
    assert (address.kind, address.to_rank, address.rank, address.request_id) == ("edge", 2, 0, "r")
