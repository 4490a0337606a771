"""A recorded request to replay, read from a log or from a bundle."""

from pathlib import Path
from typing import Any, Final

import msgspec

from conductor.core.replay import Replayer, Verdict
from dalsegno.bundle import bundle_file, manifest
from dalsegno.bundle.bundle_file import Bundle, LeftOut
from dalsegno.bundle.export import SUFFIX
from dalsegno.history import log_source, request_media, request_records, seals
from dalsegno.history.log_source import LogSource
from dalsegno.history.request_media import RecordedMedium
from dalsegno.history.request_records import RequestRecords, part_ids
from dalsegno.replay.timeline import ReplayTimeline
from dalsegno.replay.verdicts import ControlResult, pins, why_not
from models import registry
from shared.errors import ClientError
from shared.events import RequestAdmitted, RequestResumed, RequestSubmitted
from shared.log.port import StoredRecord
from shared.sealing import request_check
from shared.sealing.request_check import LogName, RequestReport
from shared.subjects import Subjects

_LEAF_CHARS: Final = 64
_ABSENT: Final = "this part of the request is missing: it was never submitted, or was removed from the bundle"


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Records that can be replayed by themselves.

    Attributes:
        source: the bundle's name; None for a log.
        requests: the ids in it, the requested one first.
        incomplete: the requests whose answers lack some of their bytes.
        unfaithful: the requests that cannot be replayed from these records, with the reason.
        damaged: the requests of which records may be missing, with the reason.
        left_out: by position, the data that a chunk lacks.
        seals: the seals that cover the records; `log` is the log that they have to name.
        configs: the known configurations by digest.
        media: the media that the requests name, for a data replay.
    """

    source: str | None
    requests: list[str]
    records: list[StoredRecord]
    subjects: Subjects
    incomplete: frozenset[str] = frozenset()
    unfaithful: dict[str, str] = {}
    damaged: dict[str, str] = {}
    is_redacted: bool = False
    seals: list[StoredRecord] = []
    log: LogName = LogName(stream="", created_ns=0)
    left_out: dict[int, LeftOut] = {}
    configs: dict[str, Any] = {}
    media: list[RecordedMedium] = []

    @property
    def admitted(self) -> dict[str, RequestAdmitted]:
        """The admission of each admitted request."""
        events = (manifest.event_of(record, self.subjects) for record in self.records)
        return {str(e.request_id): e for e in events if isinstance(e, RequestAdmitted)}

    def weights(self, request_id: str) -> dict[str, str]:
        """The recorded digests of what computed a request last; empty in logs without them."""
        found: dict[str, str] = {}
        for record in self.records:
            event = manifest.event_of(record, self.subjects)
            if isinstance(event, RequestAdmitted | RequestResumed) and event.request_id == request_id:
                found |= event.weights
        return found


def of_log(found: RequestRecords) -> History:
    """Return the history in collected records."""
    return History(
        source=None,
        requests=found.requests,
        records=found.records,
        subjects=found.subjects,
        damaged=found.damaged,
        configs=found.configs,
        seals=found.seals,
        log=seals.name_of(found.log, found.subjects),
    )


async def read(where: LogSource, request_id: str, *, with_media: bool) -> History:
    """Read a request from a log.

    Raises:
        ClientError: the log has no submission of it.
    """
    async with log_source.opened(where) as source:
        found = await request_records.collect(source.log, source.subjects, request_id)
        media = await request_media.collect_media(source, found.records) if with_media else []
    history = of_log(msgspec.structs.replace(found, configs=log_source.configs(where)))
    return msgspec.structs.replace(history, media=media)


def of_bundle(path: str) -> History:
    """Return the history in a bundle.

    Raises:
        BundleError: it is not a bundle, or it was altered.
    """
    return in_bundle(path, bundle_file.read(path))


def in_bundle(name: str, found: Bundle) -> History:
    """Return the history in a bundle that was read; `name` is that of its file.

    Raises:
        BundleError: it has no records.
    """
    if not found.kept:
        raise bundle_file.BundleError(f"{name} holds no records")
    return History(
        source=name,
        seals=found.seals,
        log=LogName(stream=Subjects(found.header.log.prefix).stream, created_ns=found.header.log.created_ns),
        requests=found.header.requests,
        records=found.records,
        subjects=Subjects(found.header.log.prefix),
        incomplete=found.incomplete,
        unfaithful=found.header.unfaithful,
        damaged=found.header.damaged,
        is_redacted=found.header.redacted,
        configs=found.header.configs,
        left_out={one.record.seq: one.left_out for one in found.kept if one.left_out is not None},
        media=request_media.with_bytes(
            request_media.named_media(found.records, Subjects(found.header.log.prefix)), found.media
        ),
    )


def in_folder(folder: Path) -> list[Path]:
    """Return the bundles in a folder, by name.

    Raises:
        ClientError: there are none.
    """
    found = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    if not found:
        raise ClientError(
            f"{folder} has no bundles: expected files *{SUFFIX}, as `dalsegno export` writes them"
        )
    return found


def control(history: History) -> list[ControlResult]:
    """Decide all requests of a history again."""
    replayer = Replayer(registry.graph, history.subjects, pins=pins, incomplete=history.incomplete)
    found = replayer.run(history.records)
    reports = {report.request_id: report for report in sealed(history, seals.trusted_keys())}
    results = []
    for request_id in _with_all_parts(history):
        verdict = found.get(request_id)
        if verdict is None and request_id != history.requests[0] and history.source is None:
            continue  # a part that was never submitted
        cannot = history.unfaithful.get(request_id)
        if verdict is None and request_id != history.requests[0]:
            verdict, cannot = Verdict(request_id=request_id), _ABSENT
        elif verdict is None:
            verdict, cannot = Verdict(request_id=request_id), "its records contain no submission"
        elif cannot is not None:
            cannot = f"its bundle has other contents than its log, and then: {cannot}"
        elif not verdict.matches:
            cannot = why_not(history.records, history.subjects, request_id)
        results.append(
            ControlResult(
                verdict=verdict,
                source=history.source,
                cannot=history.damaged.get(request_id) or cannot,
                outputs_compared=request_id not in history.incomplete,
                seals=reports.get(request_id),
            )
        )
    return results


def sealed(history: History, trusted: frozenset[bytes]) -> list[RequestReport]:
    """Compare all requests of a history with the seals of their log. Seals cannot cover a redacted bundle."""
    if history.is_redacted:
        return []
    leaves = {
        seq: bytes.fromhex(left.leaf) if len(left.leaf) == _LEAF_CHARS else None
        for seq, left in history.left_out.items()
    }
    return request_check.check(
        _with_all_parts(history),
        history.records,
        history.seals,
        history.subjects,
        history.log,
        trusted=trusted,
        left_out=leaves,
    )


def _with_all_parts(history: History) -> list[str]:
    """The requests of a history, and the parts that its submissions name: a part may have been removed."""
    found = dict.fromkeys(history.requests)
    for record in history.records:
        event = manifest.event_of(record, history.subjects)
        if isinstance(event, RequestSubmitted) and event.parts > 1 and event.parent in history.requests:
            found |= dict.fromkeys(part_ids(str(event.parent), event.parts))
    return list(found)


def timeline(history: History) -> ReplayTimeline:
    """Return a history's timeline, for stepping."""
    return ReplayTimeline(
        history.records,
        history.requests,
        graph_of=registry.graph,
        subjects=history.subjects,
        incomplete=history.incomplete,
    )
