"""Messages between a worker and its decoder processes, over a socket: a JSON object, and bytes after it.

A worker trusts no message of a decoder: a hostile file may have taken the process over. So lengths are
bounded here, and shapes are checked by the reader before memory is allocated for them.
"""

import json
import os
import socket
from typing import Any, Final

MAX_HEADER_BYTES: Final = 1 << 20
"""The largest JSON object."""
_LENGTH_BYTES: Final = 4


class ClosedError(Exception):
    """The other side has closed the socket, or has sent something that is no message."""


def send(sock: socket.socket, message: dict[str, Any], *, file: int | None = None) -> None:
    """Send a message, and a file descriptor with it."""
    encoded = json.dumps(message).encode()
    data = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded
    if file is not None:
        sent = socket.send_fds(sock, [data], [file])
        data = data[sent:]
    sock.sendall(data)


def receive(sock: socket.socket) -> dict[str, Any]:
    """Receive a message.

    Raises:
        ClosedError: there is none, or it is malformed.
        TimeoutError: the socket's timeout has expired.
    """
    return _object(sock, read(sock, _LENGTH_BYTES))


def receive_with_file(sock: socket.socket) -> tuple[dict[str, Any], int]:
    """Receive a message and the file descriptor that was sent with it."""
    length, files, _, _ = socket.recv_fds(sock, _LENGTH_BYTES, 1)
    if len(files) != 1:
        raise ClosedError("no file")
    try:
        return _object(sock, length + read(sock, _LENGTH_BYTES - len(length))), files[0]
    except BaseException:
        os.close(files[0])
        raise


def read(sock: socket.socket, nbytes: int) -> bytes:
    """Receive exactly so many bytes."""
    data = bytearray(nbytes)
    read_into(sock, memoryview(data))
    return bytes(data)


def read_into(sock: socket.socket, view: memoryview) -> None:
    """Receive bytes until `view` is full.

    Raises:
        ClosedError: the other side has closed the socket before.
    """
    view = view.cast("B")
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise ClosedError("closed")
        view = view[count:]


def _object(sock: socket.socket, length: bytes) -> dict[str, Any]:
    nbytes = int.from_bytes(length, "big")
    if nbytes > MAX_HEADER_BYTES:
        raise ClosedError(f"a message of {nbytes} bytes")
    try:
        found = json.loads(read(sock, nbytes))
    except ValueError as error:
        raise ClosedError("a malformed message") from error
    if not isinstance(found, dict):
        raise ClosedError("a message that is no object")
    return found
