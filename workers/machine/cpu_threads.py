"""The number of threads that torch computes with on a CPU.

Torch takes one thread per core, and synchronises them at a spinning barrier many times a step. If a thread
shares its core with another process, all threads wait for the operating system's next time slice: on two busy
cores a step of a tiny model took 37 ms with two threads and 1.1 ms with one (2026-11). So one core is left to
the rest of the deployment, small models get one thread, and the ranks of one machine share its cores.

Stateless nodes in a process with a KV node get a quarter of the cores, and lower priority: a decode delays
every token, but a vocoder may be late as long as there is sound to play. On two cores with other load, a
decode concurrent with a vocoder that never paused ran at 0.53 of its speed, and at 0.83 with a vocoder of
lower priority (`python -m benchmarks beside`). With two threads each, which synchronise at barriers, it ran
at 0.4 (2026-11).
"""

import os
import sys
from threading import get_native_id
from typing import Final

import torch

_SHARED_OUT: Final = 50_000_000
"""Below this number of parameters, a second thread gains less than the barriers cost."""
_ALLOWED: Final = torch.get_num_threads()
"""Torch's own limit, or `OMP_NUM_THREADS`; read at import, before any thread has set another."""
_NICER: Final = 5
"""The niceness added: a third of the time of a core that two threads share."""


def threads_for(parameters: int, cores: int) -> int:
    """Return the number of threads for a model of that size."""
    return max(1, cores - 1) if parameters >= _SHARED_OUT else 1


def kernel_threads(parameters: int, cores: int) -> int:
    """Return the number of threads of our own kernels: one per core, which share a step piece by piece."""
    return cores if parameters >= _SHARED_OUT else 1


def stateless_threads(cores: int, *, with_kv_node: bool) -> int:
    """Return the number of threads for stateless nodes, alone or in a process with a KV node."""
    return max(1, cores // 4) if with_kv_node else max(1, cores - 1)


def use_cpu_threads(threads: int) -> None:
    """Limit torch's threads for the calling thread; never raises the number."""
    torch.set_num_threads(min(_ALLOWED, threads))


def give_way() -> None:
    """Lower the priority of the calling thread, and of the threads that torch starts for it."""
    if sys.platform == "linux":  # elsewhere the priority is that of the whole process
        thread = get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
