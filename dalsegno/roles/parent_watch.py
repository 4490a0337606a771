"""The lifeline: a role never outlives the launcher that started it, not even one killed with -9.

On Linux the kernel sends the signal (`PR_SET_PDEATHSIG`, prctl(2)), as long as the parent lived when it
was asked; a look at the parent afterwards closes that gap. Elsewhere a thread looks once a second.
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
    """From here on this process dies with the process `parent`, which started it.

    SIGKILL, because nobody is left who could wait for a drain or cut it short; the log is made for it.
    """
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    pause = threading.Event()
    while not pause.wait(_LOOK_S):
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
