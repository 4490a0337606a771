"""Cards: how a life is reached, by its `worker.joined`; and where this process is.

A endpoint is another's, and may be of any version or of none: one that cannot be read is no endpoint.
Addresses and paths mean something only where they were written, so a endpoint says where that was: which
running kernel, which network.
"""

import logging
import os
import socket
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

import msgspec

_LOGGER: Final = logging.getLogger(__name__)

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

EndpointT = TypeVar("EndpointT", bound=msgspec.Struct)


def decode_endpoint(endpoint: bytes, kind: type[EndpointT]) -> EndpointT | None:
    """A peer's endpoint; None, and a line in the log, where it is none of this version."""
    try:
        return msgspec.msgpack.decode(endpoint, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: a text that is no UTF-8
        _LOGGER.warning("data plane: a %s that cannot be read: %s", kind.__name__, error)
        return None


@cache
def boot() -> str:
    """Of the running kernel: another machine's, and the same one's after a restart, is another."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def own_network() -> str:
    """Which loopback is ours: the machine's boot, and the network namespace in it."""
    try:
        return f"{boot()}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - a link that leads nowhere
    except OSError:  # a sandbox without them; a machine's name is next best
        return socket.gethostname()
