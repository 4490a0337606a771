"""The files arenas are made of, above all those that have a name."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.data_plane.contract import folder
from workers.data_plane.memory import backing
from workers.data_plane.memory.layout import PAGE, Layout

__all__ = ["folder"]

LAYOUT = Layout.holding(1 << 20, epoch=7)


@pytest.fixture
def named(folder: Path) -> Iterator[backing.Backing]:
    made = backing.named(LAYOUT, folder)
    yield made
    made.close()


def test_a_file_without_a_name_cannot_be_cut_off() -> None:
    made = backing.anonymous(LAYOUT)
    for length in (0, LAYOUT.length * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, length)
    made.close()


def test_a_file_with_a_name_is_its_users_alone_and_gone_when_it_is_closed(folder: Path) -> None:
    made = backing.named(LAYOUT, folder)
    assert made.path is not None
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [made.path.name]
    made.close()
    assert list(folder.iterdir()) == []


def test_what_somebody_holds_is_not_swept(named: backing.Backing, folder: Path) -> None:
    assert backing.sweep(folder) == 0
    assert named.path is not None
    assert named.path.exists()


def test_what_nobody_holds_is_swept_also_under_its_first_name_and_nothing_else_is(folder: Path) -> None:
    for name in ("dalsegno-arena-dead", "dalsegno-arena-half.new", "another-file"):
        (folder / name).write_bytes(b"")
    assert backing.sweep(folder) == 2
    assert [path.name for path in folder.iterdir()] == ["another-file"]


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    swept: list[int] = []

    def sweep_first(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not swept:
            swept.append(backing.sweep(folder))
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    made = backing.named(LAYOUT, folder)
    assert swept == [1]
    assert list(folder.iterdir()) == [made.path]
    made.close()


@pytest.mark.processes
def test_a_forked_child_does_not_hold_the_lock_for_its_parent(folder: Path) -> None:
    """The owner is killed while a child of its lives on: its file is swept."""
    owner = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from workers.data_plane.store import open_store\n"
        f"store = open_store(total_bytes=1 << 20, memory='named', folder=Path({str(folder)!r}))\n"
        "store.begin_incarnation(0, 1)\n"
        "store.allocate('key', 'uint8', (5000,), scope='r')\n"
        "if os.fork() == 0:\n"
        "    print('child', flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen(
        (sys.executable, "-c", owner), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "child\n"
    assert backing.sweep(folder) == 0
    process.kill()
    process.wait()
    assert backing.sweep(folder) == 1
    process.stdin.close()
    assert process.stdout.read() == ""  # the child has ended
    process.stdout.close()


def test_a_full_shared_memory_says_so(named: backing.Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        named.make_ready(0, PAGE)


_IN_A_TINY_SHARED_MEMORY = """
import asyncio, sys
from pathlib import Path
import numpy as np
from shared.errors import CapacityError
from workers.data_plane.store import open_store

async def main():
    named = open_store(total_bytes=64 << 20, memory="named", folder=Path("/dev/shm"))
    named.begin_incarnation(0, 1)
    handle = named.put("key", "uint8", (5000,), np.full(5000, 7, np.uint8), scope="a")
    try:
        named.allocate("key", "uint8", (8 << 20,), scope="b")
    except CapacityError as error:
        print(error.message)
    assert (await named.get(handle) == 7).all()
    assert named.stats().free_bytes == (64 << 20) - 8192
    without = open_store(total_bytes=64 << 20)
    without.begin_incarnation(1, 2)
    _, slot = without.allocate("key", "uint8", (8 << 20,), scope="b")
    slot[:] = 1
    await named.close()
    await without.close()

asyncio.run(main())
"""


@pytest.mark.processes
def test_a_tiny_shared_memory_is_a_lack_of_capacity_and_none_for_arenas_without_a_name() -> None:
    """As a container has it, only smaller: 4 MB."""
    mount = "mount -t tmpfs -o size=4m none /dev/shm"
    isolated = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    if subprocess.run((*isolated, mount), check=False, capture_output=True).returncode != 0:
        pytest.skip("this system lets nobody mount a file system of his own")
    done = subprocess.run(
        (*isolated, f'{mount} && exec "$@"', "sh", sys.executable, "-c", _IN_A_TINY_SHARED_MEMORY),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no memory for a tensor of 8388608 bytes: No space left on device")
