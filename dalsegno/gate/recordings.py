"""The sources of a gate, read into memory: logs of data dirs or servers, bundles, folders of bundles."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.bundle import bundle_file
from dalsegno.bundle.export import SUFFIX
from dalsegno.gate.examination import Recording
from dalsegno.history import log_source, sealed_log, seals
from dalsegno.history.damage import Damage, described
from dalsegno.history.log_source import LogSource
from dalsegno.replay import recorded_request
from dalsegno.replay.recorded_request import History
from shared.errors import ClientError
from shared.ids import is_token
from shared.log.port import Log, LogState
from shared.sealing.findings import Level, worst
from shared.sealing.log_check import LogReport
from shared.subjects import Subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The recordings that the user named: logs, each with its name, and the files of bundles."""

    logs: Sequence[tuple[str, LogSource]]
    bundles: Sequence[str]


def named(what: Sequence[str], where: LogSource) -> Sources:
    """Find out what each SOURCE is.

    A folder without bundles is a data dir; without any SOURCE, `where` is the log.

    Raises:
        ClientError: it is none of these.
    """
    logs: list[tuple[str, LogSource]] = []
    bundles: list[str] = []
    for one in what:
        path = Path(one)
        if one == bundle_file.STDIN or path.is_file():
            bundles.append(one)
        elif path.is_dir() and any(entry.suffix == SUFFIX for entry in path.iterdir()):
            bundles += map(str, recorded_request.in_folder(path))
        elif path.is_dir():
            logs.append((one, LogSource(data_dir=path, prefix=where.prefix)))
        else:
            raise ClientError(
                f"{one}: expected a data dir, a bundle, or a folder of bundles; there is no such file"
            )
    if where.is_named or not what:
        logs.append((where.nats or str(where.data_dir or ""), where))
    files = {one if one == bundle_file.STDIN else str(Path(one).resolve()): one for one in reversed(bundles)}
    return Sources(logs=logs, bundles=list(reversed(files.values())))


def of_bundle(path: str) -> Recording:
    """Read a bundle.

    Raises:
        BundleError: it is none, or was altered.
    """
    return of_history(path, recorded_request.of_bundle(path))


def of_history(name: str, history: History) -> Recording:
    """Return the recording of a bundle that was read."""
    return Recording(
        name=name,
        subjects=history.subjects,
        records=history.records,
        history=history,
        configs=history.configs,
        damaged=history.damaged,
    )


async def of_log(name: str, where: LogSource) -> Recording:
    """Read a whole log.

    Raises:
        DalSegnoError: it cannot be read.
    """
    async with log_source.open_log(where) as (log, subjects):
        return await of_opened(name, log, subjects, log_source.configs(where))


async def of_opened(name: str, log: Log, subjects: Subjects, configs: dict[str, Any]) -> Recording:
    """Read a whole log that is open.

    Raises:
        DalSegnoError: it cannot be read.
    """
    state = await log.state()
    damage = Damage(state.missing, subjects)
    sealed = await sealed_log.begun(log, subjects, seals.trusted_keys())
    records, requests = [], dict[str, None]()
    async for record in log.history(subjects.logged(), end_seq=sealed.extent.last_seq):
        records.append(record)
        damage.take(record)
        sealed.check.take(record)
        address = subjects.parse(record.subject)
        if address is not None and address.request_id is not None and is_token(address.request_id):
            requests[str(address.request_id)] = None
    return Recording(
        name=name,
        subjects=subjects,
        records=records,
        configs=configs,
        damaged=damage.of(requests),
        begins=_begins(state),
        tampered=_tampered(sealed.check.report()),
    )


def _begins(state: LogState) -> str:
    """The reason why scheduling cannot be decided again from this log; empty if it can."""
    if state.missing:
        return f"the log is damaged: {described(state.missing)}"
    if state.first_seq > 1:
        return f"the log begins at record {state.first_seq:,}: what was before has expired"
    return ""


def _tampered(report: LogReport) -> str:
    if worst(report.findings) is not Level.CHANGED:
        return ""
    return "; ".join(sealed_log.line_of(one) for one in report.findings if one.level is Level.CHANGED)
