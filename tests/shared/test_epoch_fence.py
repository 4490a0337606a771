"""The epoch fence voids the events of deposed conductors, and no others."""

import pytest

from shared.epoch_fence import EpochFence
from shared.events import EpochOpened, RequestCancel, RequestCancelled, WalkStopped, encode
from shared.log.memory import MemoryLog, MemoryStore
from shared.subjects import Subjects


def opened(epoch: int) -> EpochOpened:
    return EpochOpened(id=f"e{epoch}", writer="conductor", epoch=epoch, conductor=f"c{epoch}", core="k")


def decision(epoch: int | None) -> RequestCancelled:
    return RequestCancelled(id="d", writer="conductor", epoch=epoch, reason="", history=b"")


def test_a_decision_of_the_epoch_in_force_counts() -> None:
    fence = EpochFence()
    assert fence.admits(opened(1))
    assert fence.admits(decision(1))


def test_behind_a_higher_epoch_the_lower_one_is_void() -> None:
    fence = EpochFence()
    fence.admits(opened(1))
    fence.admits(opened(2))
    assert not fence.admits(decision(1))
    assert not fence.admits(decision(None))
    assert fence.admits(decision(2))


def test_an_epoch_is_opened_once_and_never_again() -> None:
    fence = EpochFence()
    assert fence.admits(opened(2))
    assert not fence.admits(opened(2))
    assert not fence.admits(opened(1))
    assert fence.epoch == 2


def test_who_is_no_conductor_is_not_fenced() -> None:
    fence = EpochFence(epoch=5)
    assert fence.admits(RequestCancel())
    assert fence.admits(WalkStopped(writer="w0", epoch=1, rank=0, steps_after=0))


@pytest.mark.parametrize("junk", [0, 1, 3])
async def test_replies_of_the_server_on_the_subject_of_epochs_hide_none(
    subjects: Subjects, junk: int
) -> None:
    store = MemoryStore(subjects)
    for event in (opened(1), opened(2)):
        store.append(subjects.epoch, encode(event))
    for _ in range(junk):
        store.append(subjects.epoch, b'{"type":"io.nats.jetstream.api.v1.stream_info_response"}')

    assert (await EpochFence.read(MemoryLog(store), subjects)).epoch == 2


async def test_a_log_without_epochs_has_none_in_force(subjects: Subjects) -> None:
    store = MemoryStore(subjects)
    assert (await EpochFence.read(MemoryLog(store), subjects)).epoch == 0
    store.append(subjects.epoch, b"{}")
    assert (await EpochFence.read(MemoryLog(store), subjects)).epoch == 0
