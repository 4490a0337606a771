"""Another worker's process, with a store of its own: told what to do over a pipe, and killed without a word.

Started by a fork server that has imported numpy already: a process takes milliseconds.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from shared.tensors import Handle
from tests.workers.data_plane.kinds import KINDS
from workers.data_plane.port import Bytes, StoreStats

_context: Final = multiprocessing.get_context("forkserver")
_PATIENCE_S: Final = 20.0


class Other:
    """The process, as the test that started it sees it."""

    def __init__(self, kind: str, total_bytes: int, folder: Path) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, kind, total_bytes, folder), daemon=True)
        self._process.start()
        theirs.close()
        self.endpoints: dict[str, bytes] = self._hear()

    def begin_incarnation(self, rank: int, incarnation: int) -> None:
        self._ask("begin_incarnation", rank, incarnation)

    def add_peer(self, rank: int, incarnation: int, endpoints: dict[str, bytes]) -> None:
        self._ask("add_peer", rank, incarnation, endpoints)

    def put(self, fill: int, nbytes: int, scope: str = "r") -> Handle:
        handle = self._ask("put", fill, nbytes, scope)
        assert isinstance(handle, Handle)
        return handle

    def look(self, handle: Handle) -> int:
        """Get a tensor and keep its view; the sum of its bytes."""
        return int(self._ask("look", handle))

    def end(self, scope: str) -> int:
        return int(self._ask("end", scope))

    def stats(self) -> StoreStats:
        found = self._ask("stats")
        assert isinstance(found, StoreStats)
        return found

    def pause(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """As the kernel does when memory is short; returns when nothing of the process is left."""
        self._process.kill()
        self._process.join(_PATIENCE_S)
        assert self._process.exitcode == -signal.SIGKILL
        self._connection.close()

    def _ask(self, *words: Any) -> Any:
        self._connection.send(words)
        return self._hear()

    def _hear(self) -> Any:
        assert self._connection.poll(_PATIENCE_S), "the other process says nothing"
        return self._connection.recv()


@contextmanager
def other(kind: str, total_bytes: int, folder: Path) -> Iterator[Other]:
    """Another process for as long as it is needed, or until it is killed."""
    _context.set_forkserver_preload([__name__])
    process = Other(kind, total_bytes, folder)
    try:
        yield process
    finally:
        if process._process.is_alive():
            process.kill()


def filled(fill: int, nbytes: int) -> Bytes:
    return np.full(nbytes, fill, np.uint8)


def _serve(connection: Connection, kind: str, total_bytes: int, folder: Path) -> None:
    store = KINDS[kind](total_bytes, folder)
    kept: list[Bytes] = []

    def put(fill: int, nbytes: int, scope: str) -> Handle:
        return store.put("other", "uint8", (nbytes,), filled(fill, nbytes), scope=scope)

    def look(handle: Handle) -> int:
        kept.append(runner.run(store.get(handle)))
        return int(kept[-1].sum())

    verbs: dict[str, Callable[..., Any]] = {
        "put": put,
        "look": look,
        "begin_incarnation": store.begin_incarnation,
        "add_peer": store.add_peer,
        "end": store.end,
        "stats": store.stats,
    }
    connection.send(store.endpoints)
    with asyncio.Runner() as runner:
        while True:
            verb, *words = connection.recv()
            connection.send(verbs[verb](*words))
