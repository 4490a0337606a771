import os
import sys
from threading import Thread, get_native_id

import pytest
import torch

from workers.machine import cpu_threads
from workers.machine.cpu_threads import give_way, stateless_threads, threads_for, use_cpu_threads


@pytest.mark.parametrize(
    ("parameters", "cores", "threads"),
    [(600_000, 64, 1), (600_000, 1, 1), (600_000_000, 1, 1), (600_000_000, 2, 1), (8_000_000_000, 16, 15)],
)
def test_one_core_is_left_and_small_models_are_not_shared_out(
    parameters: int, cores: int, threads: int
) -> None:
    assert threads_for(parameters, cores) == threads


@pytest.mark.parametrize(
    ("cores", "with_kv_node", "threads"),
    [(1, True, 1), (2, True, 1), (16, True, 4), (2, False, 1), (16, False, 15)],
)
def test_stateless_nodes_leave_most_cores_to_a_decode_beside_them(
    cores: int, with_kv_node: bool, threads: int
) -> None:
    assert stateless_threads(cores, with_kv_node=with_kv_node) == threads


def test_a_thread_limits_and_gives_way_for_itself_alone() -> None:
    found: list[tuple[int, int]] = []

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, get_native_id())

    def work() -> None:
        use_cpu_threads(1)
        give_way()
        found.append((torch.get_num_threads(), priority()))

    before = priority()
    thread = Thread(target=work)
    thread.start()
    thread.join()

    assert found == [(1, min(before + 5, 19) if sys.platform == "linux" else before)]
    assert priority() == before


def test_a_thread_that_comes_later_may_have_more_than_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives a new thread what another one has set last."""
    monkeypatch.setattr(cpu_threads, "_ALLOWED", 4)
    found: list[int] = []

    def work(threads: int) -> None:
        use_cpu_threads(threads)
        found.append(torch.get_num_threads())

    for threads in (1, 1000, 1):
        thread = Thread(target=work, args=(threads,))
        thread.start()
        thread.join()

    assert found == [1, 4, 1]
