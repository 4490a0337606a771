"""Endpoints in `worker.joined`, by which an incarnation is reached; the location of this process.

An endpoint comes from another process, of any version: one that cannot be decoded counts as absent. Addresses
and paths are valid only where they were written, so an endpoint names that place: the running kernel, or the
network.
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
    """Return a decoded endpoint; None, with a warning, if it is not of this version."""
    try:
        return msgspec.msgpack.decode(endpoint, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        _LOGGER.warning("data plane: a %s that cannot be decoded: %s", kind.__name__, error)
        return None


@cache
def boot() -> str:
    """Return the id of the running kernel; each machine, and each boot, has another."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def own_network() -> str:
    """Return the identity of our loopback: boot id and network namespace."""
    try:
        return f"{boot()}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - a link without a target
    except OSError:  # a sandbox without namespaces; the host name is the next best
        return socket.gethostname()
