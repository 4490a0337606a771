"""An order to a template: the process that it is to fork.

An order and four files are one message on a socket that keeps the bounds of messages: standard input, output
and error, and the pipe through which the template reports on the process:

    pid         when it has been forked
    status      when it has ended: the exit status, negative for a signal

A pipe that ends without a status says that the template has ended, and its processes with it.
"""

import signal
import socket
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

_FILES: Final = 4
_MOST_BYTES: Final = 2**20
REPORT: Final = struct.Struct("=i")
"""One report: a process id, or a status."""
STATUS_UNKNOWN: Final = -signal.SIGKILL
"""The status of a process whose template has ended: it was killed too."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A process to fork.

    Attributes:
        name: the process's name in `ps` and `top`; the kernel keeps 15 bytes.
        args: the arguments of `dalsegno`.
        env: all of its environment.
        cwd: its folder; None for the template's.
    """

    name: str
    args: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None = None


def send(control: socket.socket, order: Order, files: Sequence[int]) -> None:
    """Send an order with its files: input, output, error, report.

    Raises:
        OSError: the template has ended, or the order is too long for one message.
    """
    assert len(files) == _FILES
    socket.send_fds(control, [msgspec.msgpack.encode(order)], files)


def receive(control: socket.socket) -> tuple[Order, list[int]] | None:
    """Receive an order and its files; None if the sender has ended."""
    data, files, _, _ = socket.recv_fds(control, _MOST_BYTES, _FILES)
    return (msgspec.msgpack.decode(data, type=Order), files) if data else None
