import socket
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.peers import together
from workers.kv_engine.parallel import collectives
from workers.kv_engine.parallel.collectives import TorchPeers
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.rendezvous import Rendezvous

pytestmark = pytest.mark.processes


CPU = torch.device("cpu")


def meetings(size: int) -> list[Rendezvous]:
    """Return the rendezvous of each member of a group on this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    return [
        Rendezvous(
            index=index,
            size=size,
            address=address,
            port=port,
            own_address="127.0.0.1",
            key="k",
            listener=listener if index == 0 else None,
        )
        for index in range(size)
    ]


def members(size: int) -> list[TorchPeers]:
    return together([partial(TorchPeers, meeting, CPU) for meeting in meetings(size)])


def test_members_add_and_join_what_they_have() -> None:
    def work(member: TorchPeers) -> tuple[list[float], list[list[int]]]:
        mine = torch.tensor([1.0, 10.0]) * (member.index + 1)
        member.add(mine)
        part = torch.full((2, 4), member.index)[:, ::2]  # not in one piece
        return mine.tolist(), member.join(part).tolist()

    found = together([partial(work, member) for member in members(3)])

    assert found == [([6.0, 60.0], [[0, 0, 1, 1, 2, 2]] * 2)] * 3


def test_a_member_that_is_gone_is_told_of_at_once() -> None:
    both = members(2)
    one = both.pop()
    both.clear()

    with pytest.raises(
        GroupLostError, match=r"a sum over all members failed \([A-Z][^/]+\): the whole group"
    ):
        one.add(torch.ones(3))


def test_members_that_do_not_come_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CONNECT_TIMEOUT_S", 0.2)

    with pytest.raises(GroupLostError, match="the members cannot be connected"):
        TorchPeers(meetings(2)[0], CPU)


def test_a_member_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "COLLECTIVE_TIMEOUT_S", 0.2)
    one, other = members(2)

    with pytest.raises(GroupLostError, match="a sum over all members failed"):
        one.add(torch.ones(3))
    assert other.size == 2, "it is there, and does nothing"


def test_between_gpus_sums_go_first_as_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SimpleNamespace] = []

    class Nccl(SimpleNamespace):
        Options = SimpleNamespace

        def __init__(self, store: object, index: int, size: int, options: SimpleNamespace) -> None:
            made.append(options)
            super().__init__(set_timeout=lambda _: None)

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)

    TorchPeers(meetings(1)[0], torch.device("cuda", 0))

    assert [options.is_high_priority_stream for options in made] == [True]
