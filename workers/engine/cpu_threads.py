"""How many threads torch computes with on a CPU.

Torch takes a thread per core and has them meet at a barrier many times a step, spinning. A thread that
shares its core with another process makes all of them wait for the operating system's next slice: on
two busy cores a step of a tiny model took 37 ms with two threads and 1.1 ms with one (2026-11). So a
core is left to the rest of the deployment, and models too small to share out get one thread.
"""

import os
from typing import Final

import torch

_SHARED_OUT: Final = 50_000_000
"""Below so many parameters a second thread gains less than the barriers cost."""


def threads_for(parameters: int, cores: int) -> int:
    """The threads a model of that size is computed with."""
    return max(1, cores - 1) if parameters >= _SHARED_OUT else 1


def use_cpu_threads(parameters: int) -> None:
    """Limit torch's threads; fewer, if `OMP_NUM_THREADS` said so, stay fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(torch.get_num_threads(), threads_for(parameters, cores)))
