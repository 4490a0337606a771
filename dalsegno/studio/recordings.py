"""What the studio shows: a log that it reads as a reader, and bundles that it keeps in memory.

A recording gives a list of its requests, and the history of each. Histories are kept, with what is computed
from them, while they are looked at; that of an open request is read again when the log has grown.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from dalsegno.bundle import bundle_file, manifest
from dalsegno.gate import recordings as whole_recordings
from dalsegno.gate.examination import Recording as WholeRecording
from dalsegno.history import request_records
from dalsegno.history.log_source import OpenedLog
from dalsegno.history.prompts import prompt_of
from dalsegno.history.request_filter import RequestFilter
from dalsegno.history.request_index import between, opened_requests
from dalsegno.history.request_query import newest
from dalsegno.history.summary import Summary
from dalsegno.history.summary_fold import SummaryFold
from dalsegno.replay import recorded_request
from dalsegno.replay.recorded_request import History
from dalsegno.studio.cluster_view import ClusterFold
from dalsegno.studio.study import Study
from dalsegno.why.comparison import around
from shared.errors import ClientError
from shared.events import RequestSubmitted
from shared.log.port import StoredRecord

_KEPT: Final = 6
"""Requests whose history is kept."""
_MAX_UPLOADED: Final = 1000
LOG: Final = "log"
"""The id of the log among the recordings."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the list: where it is recorded, and its summary."""

    source: str
    source_name: str
    summary: Summary


class Recording(Protocol):
    """One source of recorded requests."""

    id: str
    name: str

    @property
    def configs(self) -> dict[str, Any]:
        """The known configurations by digest, the newest last."""
        ...

    async def rows(self, wanted: RequestFilter, limit: int) -> list[Row]:
        """Return at most `limit` of the requests that a filter chooses, newest first."""
        ...

    @property
    def cluster(self) -> ClusterFold:
        """The cluster at any position."""
        ...

    async def extent(self) -> tuple[int, int]:
        """Return the first and the last position."""
        ...

    async def whole(self) -> WholeRecording:
        """Read all records, for questions about all requests.

        Raises:
            DalSegnoError: they cannot be read.
        """
        ...

    async def study(self, request_id: str) -> Study:
        """Return a request with all that can be computed from its history.

        Raises:
            ClientError: there is no such request, or its beginning has expired.
        """
        ...


@dataclass
class BundleRecording:
    """A bundle.

    Attributes:
        summaries: its requests, in order of submission.
    """

    id: str
    name: str
    history: History
    summaries: list[Summary] = field(init=False)
    _prompts: dict[str, str] = field(default_factory=dict)
    _studies: dict[str, Study] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fold = SummaryFold(self.history.subjects)
        for record in self.history.records:
            fold.take(record)
            event = manifest.event_of(record, self.history.subjects)
            if isinstance(event, RequestSubmitted):
                self._prompts.setdefault(str(event.request_id), prompt_of(event.inputs))
        self.summaries = [tracked.summary for tracked in fold.requests.values()]

    async def rows(self, wanted: RequestFilter, limit: int) -> list[Row]:
        now_ns = time.time_ns()
        found = (
            Row(source=self.id, source_name=self.name, summary=one)
            for one in reversed(self.summaries)
            if wanted.accepts(one, now_ns) and wanted.accepts_prompt(self._prompts.get(one.request_id, ""))
        )
        return list(found)[:limit]

    @cached_property
    def cluster(self) -> ClusterFold:
        async def read(first: int, last: int) -> AsyncIterator[StoredRecord]:
            for record in self.history.records:
                if first <= record.seq <= last:
                    yield record

        return ClusterFold(self.history.subjects, read)

    async def extent(self) -> tuple[int, int]:
        return self.history.records[0].seq, self.history.records[-1].seq

    @property
    def configs(self) -> dict[str, Any]:
        return self.history.configs

    async def whole(self) -> WholeRecording:
        return whole_recordings.of_history(self.name, self.history)

    async def study(self, request_id: str) -> Study:
        if request_id not in {one.request_id for one in self.summaries} | {*self.history.requests}:
            raise ClientError(f"{self.name} has no request {request_id!r}")
        return self._studies.setdefault(request_id, Study(self.history, request_id, []))


@dataclass
class LogRecording:
    """A log, opened with the permissions of a reader.

    Attributes:
        is_live: a deployment may be writing to it.
    """

    name: str
    opened: OpenedLog
    configs: dict[str, Any]
    is_live: bool
    id: str = LOG
    _kept: OrderedDict[str, tuple[int, Study]] = field(default_factory=OrderedDict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def rows(self, wanted: RequestFilter, limit: int) -> list[Row]:
        log, subjects = self.opened.log, self.opened.subjects
        async with (
            self._lock,  # one user of the index at a time: another one would read the whole log
            opened_requests(log, subjects, self.opened.index) as requests,
        ):
            found = await newest(log, subjects, requests, wanted, limit, now_ns=time.time_ns())
        return [Row(source=LOG, source_name=self.name, summary=one) for one in reversed(found)]

    @cached_property
    def cluster(self) -> ClusterFold:
        log, wanted = self.opened.log, self.opened.subjects.logged()
        return ClusterFold(self.opened.subjects, lambda first, last: log.history(wanted, first, last))

    async def extent(self) -> tuple[int, int]:
        state = await self.opened.log.state()
        return max(state.first_seq, 1), max(state.last_seq, 1)

    async def whole(self) -> WholeRecording:
        return await whole_recordings.of_opened(
            self.name, self.opened.log, self.opened.subjects, self.configs
        )

    async def study(self, request_id: str) -> Study:
        async with self._lock:
            last_seq = (await self.opened.log.state()).last_seq
            seq, known = self._kept.get(request_id, (0, None))
            if known is not None and (known.has_ended or seq == last_seq):
                self._kept.move_to_end(request_id)
                return known
            found = await self._read(request_id)
            self._kept[request_id] = last_seq, found
            self._kept.move_to_end(request_id)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found

    async def _read(self, request_id: str) -> Study:
        log, subjects = self.opened.log, self.opened.subjects
        found = await request_records.collect(log, subjects, request_id)
        async with opened_requests(log, subjects, self.opened.index) as requests:
            own = next((one for one in requests.newest() if one.request_id == request_id), None)
            neighbours = between(requests, *around(own)) if own is not None else []
        history = recorded_request.of_log(msgspec.structs.replace(found, configs=self.configs))
        return Study(history, request_id, neighbours)


@dataclass(slots=True)
class Shelf:
    """All recordings: at most one log, and bundles."""

    log: LogRecording | None = None
    bundles: dict[str, BundleRecording] = field(default_factory=dict)

    def add_file(self, path: Path) -> BundleRecording:
        """Add the bundle in a file.

        Raises:
            BundleError: it is no bundle, or was altered.
        """
        return self._add(path.name, recorded_request.of_bundle(str(path)))

    def add(self, name: str, file: BinaryIO) -> BundleRecording:
        """Add the bundle in an open file.

        Raises:
            BundleError: it is no bundle, or was altered.
            ClientError: there are too many.
        """
        if len(self.bundles) >= _MAX_UPLOADED:
            raise ClientError(f"there are {_MAX_UPLOADED} bundles already: start another studio for more")
        return self._add(name, recorded_request.in_bundle(name, bundle_file.read_from(name, file)))

    def _add(self, name: str, history: History) -> BundleRecording:
        found = BundleRecording(f"b{len(self.bundles) + 1}", name, history)
        self.bundles[found.id] = found
        return found

    def find(self, source: str) -> Recording:
        """Return a recording by its id.

        Raises:
            ClientError: there is none.
        """
        found = self.log if source == LOG else self.bundles.get(source)
        if found is None:
            raise ClientError(f"there is no recording {source!r}: it was of another run of the studio")
        return found

    async def rows(self, wanted: RequestFilter, limit: int, of: str) -> list[Row]:
        """Return the newest requests of the log (`log`), of a bundle, or of all `bundles`, newest first."""
        if of != "bundles":
            return await self.find(of).rows(wanted, limit)
        found = [row for one in self.bundles.values() for row in await one.rows(wanted, limit)]
        return sorted(found, key=lambda row: -row.summary.start_ns)[:limit]
