"""The files of an index of a log's requests. They are derived from the log, and may be deleted at any time.

    <folder>/lock             held (flock) by the one command that uses the other two
    <folder>/requests.sqlite  a row for each request
    <folder>/seal.json        the log of the rows, up to which position, and the digest of the database

A database with another digest than its seal says is damaged, or is that of a command that was killed before
it could seal its changes. It is thrown away, like one of another log or of other code. So the database needs
no journal, and nothing is synced to the disk: a crash costs the index.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import sqlite3
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from dalsegno.history import summary, summary_fold
from dalsegno.history.summary import Summary
from dalsegno.history.summary_fold import Doubt, Tracked

_FORM: Final = 1
"""To be raised when rows of before this change would be wrong. A change of the fold's own modules shows in
`code_digest`."""
_LOCK_PATIENCE_S: Final = 2.0
_LOCK_RETRY_S: Final = 0.01
_TABLES: Final = """
CREATE TABLE requests (
  seq INTEGER PRIMARY KEY, request_id TEXT NOT NULL UNIQUE, start_ns INTEGER NOT NULL,
  summary BLOB NOT NULL, waiting BLOB
);
CREATE TABLE doubts (seq INTEGER PRIMARY KEY, needs_seq INTEGER NOT NULL);
"""
_PRAGMAS: Final = ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "secure_delete=ON")
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_SUMMARY: Final = msgspec.msgpack.Decoder(Summary)
_WAITING: Final = msgspec.msgpack.Decoder(list[tuple[str, bytes]])


class LogName(msgspec.Struct, frozen=True):
    """The identity of a log: a recreated one is another log."""

    stream: str
    created_ns: int


class Fold(msgspec.Struct, frozen=True, kw_only=True):
    """The position of the fold of the rows.

    Attributes:
        position: the position of the last folded record; 0 before the first.
        record: the digest of that record, by which a restored or forked log is noticed.
        epoch: the epoch in force there, opened at `epoch_seq`.
    """

    position: int = 0
    record: str = ""
    epoch: int = 0
    epoch_seq: int = 0


class _Seal(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `seal.json`; a second line has its digest."""

    code: str
    log: LogName
    fold: Fold
    database: str


def code_digest() -> str:
    """Return the digest of the code on which the rows depend."""
    total = hashlib.blake2b(f"{_FORM}{_TABLES}".encode(), digest_size=16)
    for file in (summary.__file__, summary_fold.__file__):
        total.update(Path(file).read_bytes())
    return total.hexdigest()


@asynccontextmanager
async def lock(folder: Path) -> AsyncGenerator[bool, None]:
    """Hold the lock of an index; yield whether it was free, or became so within some seconds.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # noqa: ASYNC240 - one call
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield await _is_locked(handle)
    finally:
        os.close(handle)


async def _is_locked(handle: int) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _LOCK_PATIENCE_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_LOCK_RETRY_S)


def discard(folder: Path) -> None:
    """Remove the index in a folder, if there is one; the caller holds its lock, or that of the data dir."""
    for path in (folder / "seal.json", *folder.glob("requests.sqlite*")):
        path.unlink(missing_ok=True)


class IndexStore:
    """The rows of an index, and where their fold stands. The caller holds its lock.

    Raises:
        OSError, sqlite3.Error: from every method; the caller then discards the index.
    """

    def __init__(self, folder: Path, log: LogName) -> None:
        self._folder = folder
        self._log = log
        self._database_path = folder / "requests.sqlite"
        self._seal_path = folder / "seal.json"
        self._is_sealed = False
        self.fold = Fold()
        if (fold := self._sealed_fold()) is not None:
            self.fold, self._is_sealed = fold, True
        else:
            discard(folder)
        handle = os.open(self._database_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._made = os.fstat(handle)
        os.close(handle)
        self._database = sqlite3.connect(self._database_path, isolation_level=None)
        try:
            for pragma in _PRAGMAS:
                self._database.execute(f"PRAGMA {pragma}")
            if not self._is_sealed:
                self._database.executescript(_TABLES)
        except sqlite3.Error:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the database; its changes are lost unless they were sealed."""
        self._database.close()

    # ---- reading -------------------------------------------------------------------------------------
    def load(self, request_id: str) -> Tracked | None:
        """Return a request with what the fold needs of it."""
        found = self._database.execute(
            "SELECT summary, waiting FROM requests WHERE request_id = ?", (request_id,)
        ).fetchone()
        if found is None:
            return None
        return Tracked(_SUMMARY.decode(found[0]), _WAITING.decode(found[1]) if found[1] else [])

    def count(self) -> int:
        """Return the number of requests."""
        return int(self._database.execute("SELECT count(*) FROM requests").fetchone()[0])

    def newest(self, since_ns: int, until_ns: int) -> Iterator[Summary]:
        """Iterate over the requests that were submitted in a time range, newest first."""
        rows = self._database.execute(
            "SELECT summary FROM requests WHERE start_ns >= ? AND start_ns < ? ORDER BY seq DESC",
            (since_ns, until_ns),
        )
        for (row,) in rows:
            yield _SUMMARY.decode(row)

    def is_doubtful(self, first_seq: int) -> bool:
        """Tell whether a record from `first_seq` on was judged by one that has expired."""
        query = "SELECT 1 FROM doubts WHERE needs_seq < ? AND seq >= ? LIMIT 1"
        return self._database.execute(query, (first_seq, first_seq)).fetchone() is not None

    # ---- changes -------------------------------------------------------------------------------------
    def write(self, requests: Iterable[Tracked], doubts: Iterable[Doubt]) -> None:
        """Write requests that were folded; each replaces what is there under its id."""
        rows: list[tuple[Any, ...]] = [
            (
                one.summary.seq,
                one.summary.request_id,
                one.summary.start_ns,
                _ENCODE(one.summary),
                _ENCODE(one.waiting) if one.waiting else None,
            )
            for one in requests
        ]
        self._is_sealed = False
        self._database.execute("BEGIN")
        self._database.executemany("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?)", rows)
        self._database.executemany(
            "INSERT INTO doubts VALUES (?, ?)", [(doubt.seq, doubt.needs_seq) for doubt in doubts]
        )
        self._database.execute("COMMIT")

    def expire(self, first_seq: int) -> None:
        """Remove what the log has removed: all before `first_seq`."""
        for table in ("requests", "doubts"):
            removed = self._database.execute(f"DELETE FROM {table} WHERE seq < ?", (first_seq,))  # noqa: S608 - no input
            self._is_sealed = self._is_sealed and removed.rowcount == 0

    def seal(self, fold: Fold) -> None:
        """Note where the fold of the rows stands now, and that the database is whole."""
        if self._is_sealed and fold == self.fold:
            return
        if not os.path.samestat(self._database_path.stat(), self._made):
            raise FileNotFoundError(f"{self._database_path} was removed while it was used")
        self.fold = fold
        seal = _Seal(code=code_digest(), log=self._log, fold=fold, database=_file_digest(self._database_path))
        draft = self._folder / "seal.json.new"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        content = msgspec.json.encode(seal)
        with os.fdopen(handle, "wb") as file:
            file.write(b"%s\n%s\n" % (content, _digest(content)))
        draft.replace(self._seal_path)
        self._is_sealed = True

    def _sealed_fold(self) -> Fold | None:
        """Return where the stored fold stands; None if it is not of this log and code, or not whole."""
        try:
            content, _, rest = self._seal_path.read_bytes().partition(b"\n")
            if rest != _digest(content) + b"\n":
                return None
            seal = msgspec.json.decode(content, type=_Seal)
            if seal.log != self._log or seal.code != code_digest():
                return None
            return seal.fold if seal.database == _file_digest(self._database_path) else None
        except (OSError, msgspec.DecodeError):  # there is none, or it has another form
            return None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
