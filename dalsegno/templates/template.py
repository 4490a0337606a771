"""A template as its owner sees it: forked once, ordered to fork processes, closed."""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dalsegno.templates import forking, order
from dalsegno.templates.order import Order

Main: TypeAlias = Callable[[Sequence[str]], Any]
"""The command line, called with a forked process's arguments."""


@dataclass(frozen=True, slots=True)
class Template:
    """A process that forks others.

    Attributes:
        pid: the template's process id; the parent of all that it forks.
        control: the socket for orders; the template ends when it is closed.
    """

    pid: int
    control: socket.socket

    def start(self, wanted: Order, files: Sequence[int]) -> int:
        """Have a process forked with `files` as its standard input, output and error.

        Returns:
            The file from which the process's id and its status can be read (`dalsegno.templates.order`).

        Raises:
            OSError: the template has ended.
        """
        ours, theirs = os.pipe()
        try:
            order.send(self.control, wanted, [*files, theirs])
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return ours

    def close(self) -> None:
        """End the template, and with it the processes that it forked. Waits for its end."""
        self.control.close()
        os.kill(self.pid, signal.SIGKILL)  # it may be importing for seconds, and has nothing to finish
        os.waitpid(self.pid, 0)


@contextlib.contextmanager
def templates(warm: Mapping[str, Callable[[], None]], main: Main) -> Iterator[dict[str, Template]]:
    """Fork a template for each name, and end them after the block.

    There are none where they are not supported, nor in a program with threads, whose forks would not work.

    Enter it before this process has secrets or files that a forked process must not have. Forked processes do
    not run the block: they call `main`, and end (`forking.call_and_end`).

    Args:
        warm: by name, the imports that a template's processes need.
        main: the command line.
    """
    found: dict[str, Template] = {}
    if forking.is_supported() and threading.active_count() == 1:
        for name, imports in warm.items():
            found[name] = _fork(f"forks-{name}", imports, main, found.values())
    try:
        yield found
    finally:
        for template in found.values():
            template.close()


def _fork(name: str, imports: Callable[[], None], main: Main, others: Iterable[Template]) -> Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = os.getpid()
    sys.stdout.flush()  # a text that waits would be written by both processes
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for control in (ours, *(template.control for template in others)):
            control.close()
        forking.begin(name, owner)
        if not sys.flags.safe_path:
            del sys.path[0]  # a file `torch.py` in the user's current folder must not be imported
        wanted = work(theirs, imports)
        forking.call_and_end(lambda: main(wanted.args))
    theirs.close()
    return Template(pid, ours)


def work(control: socket.socket, imports: Callable[[], None]) -> Order:
    """Import, then fork a process for each order. Returns in forked processes only, with their order."""
    with contextlib.suppress(Exception):  # the process that needs what is missing will report it
        imports()
    gc.freeze()  # memory that the collector does not write to stays shared
    try:
        wanted = forking.serve(control)
    except forking.UnforkableError as error:
        print(f"processes are started without a template: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if wanted is None:
        os._exit(0)  # without the cleanup of its owner, whose copy it is
    return wanted
