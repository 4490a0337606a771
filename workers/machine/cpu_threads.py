"""How many threads torch computes with on a CPU.

Torch takes a thread per core and has them meet at a barrier many times a step, spinning. A thread that
shares its core with another process makes all of them wait for the operating system's next slice: on
two busy cores a step of a tiny model took 37 ms with two threads and 1.1 ms with one (2026-11). So a
core is left to the rest of the deployment, models too small to share out get one thread, and ranks on one
machine get their share of its cores.

Stateless nodes beside a KV node get a quarter of those, and the lower priority: a decode waits for every
token, a vocoder may be late as long as there is sound to play. On two cores that others wanted too, a
decode beside a vocoder that never paused went at 0.53 of its pace, and at 0.83 beside one of lower priority
(`python -m benchmarks beside`). With two threads each, that meet at barriers, it went at 0.4 (2026-11).
"""

import os
import sys
from threading import get_native_id
from typing import Final

import torch

_SHARED_OUT: Final = 50_000_000
"""Below so many parameters a second thread gains less than the barriers cost."""
_ALLOWED: Final = torch.get_num_threads()
"""What torch found, or `OMP_NUM_THREADS` said; a thread that comes later finds what another has set."""
_NICER: Final = 5
"""In the operating system's measure: a third of the time where two want the same core."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(parameters: int, cores: int) -> int:
    """The threads a model of that size is computed with."""
    return max(1, cores - 1) if parameters >= _SHARED_OUT else 1


def kernel_threads(parameters: int, cores: int) -> int:
    """The threads of our own kernels: one for each core, for they share out a step piece by piece."""
    return cores if parameters >= _SHARED_OUT else 1


def stateless_threads(cores: int, *, with_kv_node: bool) -> int:
    """The threads stateless nodes are computed with, in a process of their own or beside a KV node."""
    return max(1, cores // 4) if with_kv_node else max(1, cores - 1)


def use_cpu_threads(threads: int) -> None:
    """Limit torch's threads, of what the calling thread computes; fewer, if they are fewer, stay fewer."""
    torch.set_num_threads(min(_ALLOWED, threads))


def give_way() -> None:
    """Let others go first on a core that the calling thread, or one that torch starts for it, shares."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        thread = get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
