"""Parent watch: a role ends with the launcher that started it, even if the launcher is killed with -9.

On Linux the kernel sends the signal (`PR_SET_PDEATHSIG`, prctl(2)), provided that the parent still lived at
the call; comparing the parent's id afterwards closes that gap. On other systems a thread checks once a
second.
"""

import ctypes
import os
import signal
import sys
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_LOOK_S: Final = 1.0


def die_with(parent: int) -> None:
    """Kill this process when the process `parent`, which started it, ends.

    SIGKILL, because nothing is left that could wait for a drain or cut it short; the log survives it.
    """
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    pause = threading.Event()
    while not pause.wait(_LOOK_S):
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
