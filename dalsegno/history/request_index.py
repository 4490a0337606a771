"""The requests of a log, from an index of it that is kept between two commands, or from the log itself.

The log is the only source. The index is brought up to date with the log before each use, and thrown away in
any doubt: if it is damaged, or of another log, of other code, or of a log that was restored or has lost
records. Then it is made again, so the answers are those of a reader of the whole log. One command uses it at
a time; another one that waits too long reads the log instead.
"""

import hashlib
import logging
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from dalsegno.history import index_store
from dalsegno.history.index_store import Fold, IndexStore, LogName
from dalsegno.history.summary import EVER_NS, Summary
from dalsegno.history.summary_fold import SummaryFold, summaries
from shared.epoch_fence import EpochFence
from shared.log.port import Log, LogState, StoredRecord
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)
_BATCH: Final = 20_000
"""Records that are folded between two writes."""


class Requests(Protocol):
    """The requests of a log, as they were when it was opened."""

    def newest(self, since_ns: int = 0, until_ns: int = EVER_NS) -> Iterator[Summary]:
        """Iterate over the requests that were submitted in a time range, newest first."""
        ...

    def __len__(self) -> int:
        """The number of requests in the log."""
        ...


def between(requests: Requests, since_ns: int, until_ns: int) -> list[Summary]:
    """Return the requests that were submitted from `since_ns` on and before `until_ns`, oldest first."""
    return list(requests.newest(since_ns, until_ns))[::-1]


@asynccontextmanager
async def opened_requests(
    log: Log, subjects: Subjects, folder: Path | None
) -> AsyncGenerator[Requests, None]:
    """Open the requests of a log.

    Args:
        log: the log.
        subjects: its subjects.
        folder: where its index is kept, if it can be; None reads the log and keeps nothing.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    state = await log.state()
    async with AsyncExitStack() as stack:
        store = None
        if folder is not None and not state.missing:
            store = await _locked_store(stack, log, subjects, folder, state)
        if store is not None:
            yield IndexedRequests(store)
        else:
            yield ListedRequests(await summaries(log, subjects))


@dataclass(frozen=True, slots=True)
class ListedRequests:
    """Requests in memory, in order of submission."""

    requests: list[Summary]

    def newest(self, since_ns: int = 0, until_ns: int = EVER_NS) -> Iterator[Summary]:
        return (one for one in reversed(self.requests) if since_ns <= one.start_ns < until_ns)

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class IndexedRequests:
    """Requests in an index that is up to date."""

    store: IndexStore

    def newest(self, since_ns: int = 0, until_ns: int = EVER_NS) -> Iterator[Summary]:
        return self.store.newest(since_ns, until_ns)

    def __len__(self) -> int:
        return self.store.count()


class _StaleError(Exception):
    """The index is not of the log's present records."""


async def _locked_store(
    stack: AsyncExitStack, log: Log, subjects: Subjects, folder: Path, state: LogState
) -> IndexStore | None:
    """Open the index and bring it up to date; None if its folder cannot be used, or is in use."""
    try:
        if not await stack.enter_async_context(index_store.lock(folder)):
            _LOGGER.debug("the index in %s is in use: the log is read instead", folder)
            return None
        store = await _up_to_date(log, subjects, folder, state)
    except (OSError, sqlite3.Error) as error:
        _LOGGER.debug("there can be no index in %s: %s", folder, error)
        return None
    stack.callback(store.close)
    return store


async def _up_to_date(log: Log, subjects: Subjects, folder: Path, state: LogState) -> IndexStore:
    """Bring the stored index up to date; if that is impossible, make it again.

    Raises:
        OSError, sqlite3.Error: it cannot be made in this folder.
    """
    name = LogName(subjects.stream, state.created_ns)
    try:
        return await _caught_up(IndexStore(folder, name), log, subjects, state)
    except (_StaleError, OSError, sqlite3.Error) as error:
        _LOGGER.debug("the index in %s is thrown away: %s", folder, error)
    index_store.discard(folder)
    return await _caught_up(IndexStore(folder, name), log, subjects, state)


async def _caught_up(store: IndexStore, log: Log, subjects: Subjects, state: LogState) -> IndexStore:
    try:
        await _catch_up(store, log, subjects, state)
    except BaseException:
        store.close()
        raise
    return store


async def _catch_up(store: IndexStore, log: Log, subjects: Subjects, state: LogState) -> None:
    """Fold the records that the index does not have yet.

    Raises:
        _StaleError: the index is not of this log's records.
    """
    position = store.fold.position
    if position > state.last_seq:
        raise _StaleError(f"it ends at record {position}, and the log at {state.last_seq}")
    fold = SummaryFold(
        subjects, store.load, fence=EpochFence(store.fold.epoch), epoch_seq=store.fold.epoch_seq
    )
    last: StoredRecord | None = None
    async with aclosing(log.history(subjects.logged(), max(position, 1))) as records:
        async for record in records:
            if last is None and position:
                if (record.seq, _digest(record)) != (position, store.fold.record):
                    raise _StaleError(f"its record {position} is another one than the log's")
            else:
                fold.take(record)
            last = record
            if record.seq % _BATCH == 0:
                _write(store, fold)
    if last is None and position:
        raise _StaleError(f"the log no longer has record {position}")
    _write(store, fold)
    if store.is_doubtful(state.first_seq):
        raise _StaleError("a record that others were judged by has expired")
    store.expire(state.first_seq)
    if last is not None:
        store.seal(
            Fold(position=last.seq, record=_digest(last), epoch=fold.fence.epoch, epoch_seq=fold.epoch_seq)
        )


def _write(store: IndexStore, fold: SummaryFold) -> None:
    if fold.requests or fold.doubts:
        store.write(fold.requests.values(), fold.doubts)
        fold.requests.clear()
        fold.doubts.clear()


def _digest(record: StoredRecord) -> str:
    """Return the digest of a record: no two records of two logs have the same position, time and bytes."""
    total = hashlib.blake2b(f"{record.seq} {record.time_ns} {record.subject}\n".encode(), digest_size=16)
    total.update(record.data)
    return total.hexdigest()
