"""A history to replay, wherever it is from: a request in a log, or a bundle."""

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
        requests: the ids in it, the one asked for first.
        unheard: those of whose answers not all bytes are there.
        unfaithful: those that cannot be replayed from these records, and why.
        left_out: by position, of chunks whose data is not there, what it was.
        configs: by digest, the configurations they were decided under, as far as they are known.
    """

    source: str | None
    requests: list[str]
    records: list[StoredRecord]
    subjects: Subjects
    unheard: frozenset[str] = frozenset()
    unfaithful: dict[str, str] = {}
    is_redacted: bool = False
    left_out: dict[int, LeftOut] = {}
    configs: dict[str, Any] = {}

    @property
    def admitted(self) -> dict[str, RequestAdmitted]:
        """Of each request that was let in, how."""
        events = (manifest.event_of(record, self.subjects) for record in self.records)
        return {str(e.request_id): e for e in events if isinstance(e, RequestAdmitted)}


def of_log(found: RequestRecords) -> History:
    """What was collected of a request."""
    return History(
        source=None,
        requests=found.requests,
        records=found.records,
        subjects=found.subjects,
        configs=found.configs,
    )


def of_bundle(path: str) -> History:
    """What a bundle holds.

    Raises:
        BundleError: it is none, or it was altered.
    """
    found = bundle_file.read(path)
    if not found.kept:
        raise bundle_file.BundleError(f"{path} holds no records")
    return History(
        source=path,
        requests=found.header.requests,
        records=found.records,
        subjects=Subjects(found.header.log.prefix),
        unheard=found.unheard,
        unfaithful=found.header.unfaithful,
        is_redacted=found.header.redacted,
        configs=found.header.configs,
        left_out={one.record.seq: one.left_out for one in found.kept if one.left_out is not None},
    )


def in_folder(folder: Path) -> list[Path]:
    """The bundles in a folder, by name.

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
    replayer = Replayer(registry.graph, history.subjects, pins=pins, unheard=history.unheard)
    found = replayer.run(history.records)
    results = []
    for request_id in history.requests:
        verdict = found.get(request_id)
        if verdict is None and request_id != history.requests[0]:
            continue  # a part of a question that was never submitted
        cannot = history.unfaithful.get(request_id)
        if verdict is None:
            verdict, cannot = Verdict(request_id=request_id), "there is no submission of it among its records"
        elif cannot is not None:
            cannot = f"it was taken out of its log with other contents, and then: {cannot}"
        elif not verdict.matches:
            cannot = why_not(history.records, history.subjects, request_id)
        results.append(
            ControlResult(
                verdict=verdict,
                source=history.source,
                cannot=cannot,
                outputs_compared=request_id not in history.unheard,
            )
        )
    return results


def timeline(history: History) -> ReplayTimeline:
    """A history to step through."""
    return ReplayTimeline(
        history.records,
        history.requests,
        graph_of=registry.graph,
        subjects=history.subjects,
        unheard=history.unheard,
    )
