"""The work of a template: fork a process for each order, and report its end.

A fork copies only the thread that calls it, so locks that other threads hold would stay locked for ever. A
template therefore runs no event loop and no threads, and refuses to work where a library keeps some. It never
uses a GPU: CUDA does not work in a process that was forked after its first use.
"""

import atexit
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from dalsegno.config import environment
from dalsegno.roles import parent_watch
from dalsegno.templates import order
from dalsegno.templates.order import REPORT, Order

_PR_SET_NAME: Final = 15  # linux/prctl.h
_OUTPUT_LOST: Final = 120
"""Python's own status for a program whose last output could not be written."""


class UnforkableError(RuntimeError):
    """A library keeps threads, or has used a GPU: processes that are forked here would not work."""


def is_supported() -> bool:
    """True where templates work: they need a kernel with file descriptors of processes (Linux 5.3)."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def serve(control: socket.socket) -> Order | None:
    """Fork a process for each order that arrives.

    Returns:
        In a forked process its order, once its environment and files are in place; in the template None, when
        the other end of `control` is closed.

    Raises:
        UnforkableError: processes that are forked here would not work.
    """
    _check_forkable()
    reports: dict[
        int, tuple[int, int]
    ] = {}  # by the file of a process: its id, and where its end is reported
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in reports:
                    selector.unregister(key.fd)
                    _report_end(key.fd, *reports.pop(key.fd))
                    continue
                received = order.receive(control)
                if received is None:
                    return None
                wanted, files = received
                pid = _fork(files)
                if pid == 0:
                    _leave(control, [*reports, *(report for _, report in reports.values())])
                    _become(wanted, files)
                    return wanted
                if pid is not None:
                    process = os.pidfd_open(pid)
                    reports[process] = (pid, files[-1])
                    selector.register(process, selectors.EVENT_READ)


def _check_forkable() -> None:
    """Raise if this process has threads, or has used a GPU.

    OpenBLAS ends its threads before a fork and begins new ones when it needs them, so they are counted after
    a first fork.
    """
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise UnforkableError(f"{threads} threads run where one was expected; those of Python are {names}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UnforkableError("a module used CUDA while it was imported")


def _fork(files: list[int]) -> int | None:
    """Fork; return the new process's id, 0 in that process, and None if the system has no room for it."""
    try:
        pid = os.fork()
    except OSError:  # its report ends without a process: the owner starts it in another way
        for file in files:
            os.close(file)
        return None
    if pid:
        with contextlib.suppress(OSError):  # the process has done it, or has ended
            os.setpgid(pid, pid)
        for file in files[:-1]:
            os.close(file)
        with contextlib.suppress(BrokenPipeError):
            os.write(files[-1], REPORT.pack(pid))
    return pid


def _report_end(process: int, pid: int, report: int) -> None:
    """Report a process that has ended, and end what it started, which would hold its output open."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # its id belongs to it until it is waited for
    _, status = os.waitpid(pid, 0)
    os.close(process)
    with contextlib.suppress(BrokenPipeError):
        os.write(report, REPORT.pack(os.waitstatus_to_exitcode(status)))
    os.close(report)


# ---- in the forked process -----------------------------------------------------------------------------


def _leave(control: socket.socket, files: list[int]) -> None:
    """Close what belongs to the template. The selector is closed by its block."""
    control.close()
    for file in files:
        os.close(file)


def _become(wanted: Order, files: list[int]) -> None:
    """Put the environment, the files and the name of an order in place."""
    with contextlib.suppress(OSError):  # the template has done it
        os.setpgid(0, 0)
    environment.replace(wanted.env)
    if wanted.cwd is not None:
        os.chdir(wanted.cwd)
    for number, file in enumerate(files[:-1]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # they are text files
    sys.argv[1:] = wanted.args
    set_name(wanted.name)


def call_and_end(main: Callable[[], Any]) -> NoReturn:
    """Call `main`, and end this forked process as `sys.exit` would, without freeing its memory.

    Python frees every object at its end, which copies all pages that are shared with the template: 0.6 s of
    CPU where a command itself took 0.01, and as much for each role that was stopped. Threads, exit handlers
    and buffered output end as they do in a program; `multiprocessing` ends its forks in the same way.

    Raises:
        BaseException: all that `main` raises, except SystemExit with a status. It ends the process slowly.
    """
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
    if not isinstance(status, int | None):
        sys.exit(status)  # a message
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - no public name waits for all threads
    atexit._run_exitfuncs()  # noqa: SLF001 - no public name runs them
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        status = status or _OUTPUT_LOST
    os._exit(status or 0)


def set_name(name: str) -> None:
    """Set this process's name in `ps` and `top`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def begin(name: str, owner: int) -> None:
    """Begin a template's process: it ends with its owner, and hears no Ctrl-C of the terminal."""
    parent_watch.die_with(owner)
    os.setpgid(0, 0)
    set_name(name)
