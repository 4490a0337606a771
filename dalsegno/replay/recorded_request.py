"""A recorded request to replay, read from a log or from a bundle."""

from pathlib import Path
from typing import Any

import msgspec

from conductor.core.replay import Replayer, Verdict
from dalsegno.bundle import bundle_file, manifest
from dalsegno.bundle.bundle_file import LeftOut
from dalsegno.bundle.export import SUFFIX
from dalsegno.history.request_records import RequestRecords
from dalsegno.replay.timeline import ReplayTimeline
from dalsegno.replay.verdicts import ControlResult, pins, why_not
from models import registry
from shared.errors import ClientError
from shared.events import RequestAdmitted
from shared.log.port import StoredRecord
from shared.subjects import Subjects


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Records that can be replayed by themselves.

    Attributes:
        source: the bundle's name; None for a log.
        requests: the ids in it, the requested one first.
        incomplete: the requests whose answers lack some of their bytes.
        unfaithful: the requests that cannot be replayed from these records, with the reason.
        left_out: by position, the data that a chunk lacks.
        configs: the known configurations by digest.
    """

    source: str | None
    requests: list[str]
    records: list[StoredRecord]
    subjects: Subjects
    incomplete: frozenset[str] = frozenset()
    unfaithful: dict[str, str] = {}
    is_redacted: bool = False
    left_out: dict[int, LeftOut] = {}
    configs: dict[str, Any] = {}

    @property
    def admitted(self) -> dict[str, RequestAdmitted]:
        """The admission of each admitted request."""
        events = (manifest.event_of(record, self.subjects) for record in self.records)
        return {str(e.request_id): e for e in events if isinstance(e, RequestAdmitted)}


def of_log(found: RequestRecords) -> History:
    """Return the history in collected records."""
    return History(
        source=None,
        requests=found.requests,
        records=found.records,
        subjects=found.subjects,
        configs=found.configs,
    )


def of_bundle(path: str) -> History:
    """Return the history in a bundle.

    Raises:
        BundleError: it is not a bundle, or it was altered.
    """
    found = bundle_file.read(path)
    if not found.kept:
        raise bundle_file.BundleError(f"{path} holds no records")
    return History(
        source=path,
        requests=found.header.requests,
        records=found.records,
        subjects=Subjects(found.header.log.prefix),
        incomplete=found.incomplete,
        unfaithful=found.header.unfaithful,
        is_redacted=found.header.redacted,
        configs=found.header.configs,
        left_out={one.record.seq: one.left_out for one in found.kept if one.left_out is not None},
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
    results = []
    for request_id in history.requests:
        verdict = found.get(request_id)
        if verdict is None and request_id != history.requests[0]:
            continue  # a part that was never submitted
        cannot = history.unfaithful.get(request_id)
        if verdict is None:
            verdict, cannot = Verdict(request_id=request_id), "its records contain no submission"
        elif cannot is not None:
            cannot = f"its bundle has other contents than its log, and then: {cannot}"
        elif not verdict.matches:
            cannot = why_not(history.records, history.subjects, request_id)
        results.append(
            ControlResult(
                verdict=verdict,
                source=history.source,
                cannot=cannot,
                outputs_compared=request_id not in history.incomplete,
            )
        )
    return results


def timeline(history: History) -> ReplayTimeline:
    """Return a history's timeline, for stepping."""
    return ReplayTimeline(
        history.records,
        history.requests,
        graph_of=registry.graph,
        subjects=history.subjects,
        incomplete=history.incomplete,
    )
