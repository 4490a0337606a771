import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.dalsegno.fakes import gone, runs

pytestmark = pytest.mark.processes


CHILD = """
import os, signal, sys
from dalsegno.roles import parent_watch
parent_watch.die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())]).wait()
"""


async def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert runs(child)
    parent.kill()
    await parent.wait()
    await gone(child)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    not_our_parent = os.getppid()
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(not_our_parent)], capture_output=True, check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == b""
