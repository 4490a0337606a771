"""Stores that reach one another in one way and no other, by its name; also in helper processes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from workers.data_plane.assembly import ListenAddress, make_transports
from workers.data_plane.store import ArenaStore, open_store
from workers.data_plane.transports.local import LocalTransport
from workers.data_plane.transports.shm import ShmTransport
from workers.data_plane.transports.shm_named import NamedShmTransport


def _local(total_bytes: int, folder: Path) -> ArenaStore:
    return open_store(total_bytes=total_bytes, transports=[LocalTransport])


def _shm(total_bytes: int, folder: Path) -> ArenaStore:
    return open_store(total_bytes=total_bytes, transports=[ShmTransport])


def _shm_named(total_bytes: int, folder: Path) -> ArenaStore:
    return open_store(total_bytes=total_bytes, transports=[NamedShmTransport], memory="named", folder=folder)


def _tcp(total_bytes: int, folder: Path) -> ArenaStore:
    return open_store(total_bytes=total_bytes, transports=make_transports(["tcp"], ListenAddress()))


def _nixl(total_bytes: int, folder: Path) -> ArenaStore:
    return open_store(total_bytes=total_bytes, transports=make_transports(["nixl"], ListenAddress()))


KINDS: Final[Mapping[str, Callable[[int, Path], ArenaStore]]] = {
    "local": _local,
    "shm": _shm,
    "shm_named": _shm_named,
    "tcp": _tcp,
    "nixl": _nixl,
}
