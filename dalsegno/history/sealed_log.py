"""Verification of a whole log against its seals and anchors, and its result in words."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from configs import seal_keys
from dalsegno.config import resolve
from dalsegno.history.summary import iso
from shared.errors import ClientError
from shared.log.port import Log
from shared.sealing import anchors
from shared.sealing.anchors import Anchor, AnchorFormatError
from shared.sealing.findings import Finding, Level, worst
from shared.sealing.keys import fingerprint
from shared.sealing.log_check import LogCheck, LogExtent, LogReport
from shared.subjects import Subjects


class SealedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log that is being verified: `check` folds its records; `anchor_files` were compared."""

    check: LogCheck
    extent: LogExtent
    anchor_files: list[Path]


async def begun(
    log: Log, subjects: Subjects, trusted: frozenset[bytes], anchor_files: Sequence[Path] = ()
) -> SealedLog:
    """Begin the verification of a log: read its seals, and the anchors of it.

    A running conductor stores records, then their seal, then its anchor. They are read the other way round:
    what an earlier one of these reads names is there for the later ones.

    Raises:
        ClientError: a file of anchors cannot be read.
    """
    created_ns = (await log.state()).created_ns
    default = seal_keys.anchor_file(resolve.sealing(), subjects.stream, created_ns)
    files = [*anchor_files, *([default] if default.exists() else [])]
    kept = [anchor for path in files for anchor in _anchors(path)]
    async with aclosing(log.history([subjects.sealed])) as records:
        found = [record async for record in records]
    state = await log.state()
    extent = LogExtent(
        stream=subjects.stream,
        created_ns=state.created_ns,
        first_seq=state.first_seq,
        last_seq=state.last_seq,
        now_ns=time.time_ns(),
    )
    return SealedLog(
        check=LogCheck(extent, found, subjects, trusted=trusted, anchors=kept),
        extent=extent,
        anchor_files=files,
    )


async def verified(
    log: Log, subjects: Subjects, trusted: frozenset[bytes], anchor_files: Sequence[Path] = ()
) -> tuple[LogReport, SealedLog]:
    """Verify a whole log."""
    begin = await begun(log, subjects, trusted, anchor_files)
    history = log.history(subjects.logged(), end_seq=begin.extent.last_seq)
    async with aclosing(history) as records:
        async for record in records:
            begin.check.take(record)
    return begin.check.report(), begin


def _anchors(path: Path) -> list[Anchor]:
    try:
        with path.open("rb") as file:
            return anchors.read(file)
    except OSError as error:
        raise ClientError(f"cannot read the anchors {path}: {error.strerror}") from error
    except AnchorFormatError as error:
        raise ClientError(f"{path}: {error}") from error


def lines(report: LogReport, begin: SealedLog) -> list[str]:
    """Return the result as text."""
    extent = begin.extent
    shown = [f"log {extent.stream}: records {extent.first_seq} to {extent.last_seq}"]
    if report.seals:
        keys = ", ".join(map(fingerprint, report.keys))
        shown.append(
            f"{report.seals} seals by key {keys}; {report.sealed} records are as they were sealed, "
            f"the last one of {iso(report.last_sealed_ns)}"
        )
    shown += [line_of(finding) for finding in report.findings]
    if report.anchors:
        shown.append(f"{report.anchors} anchors compared: {', '.join(map(str, begin.anchor_files))}")
    else:
        shown.append("no anchors of this log: a removed end, or a log replaced as a whole, cannot be noticed")
    return shown


def line_of(finding: Finding) -> str:
    """Return a finding as one line."""
    word = {Level.CHANGED: "TAMPERED", Level.UNPROVEN: "not proven", Level.NOTE: "note"}[finding.level]
    return f"{word}: records {finding.first_seq} to {finding.last_seq}: {finding.text}"


def as_plain(report: LogReport, begin: SealedLog) -> dict[str, Any]:
    """Return the result as JSON values."""
    level = worst(report.findings)
    return {
        "log": msgspec.to_builtins(begin.extent),
        "result": "intact" if level is Level.NOTE else str(level),
        "seals": report.seals,
        "sealed_records": report.sealed,
        "last_sealed_ns": report.last_sealed_ns,
        "keys": [key.hex() for key in report.keys],
        "anchors": report.anchors,
        "findings": [msgspec.to_builtins(finding) for finding in report.findings],
    }
