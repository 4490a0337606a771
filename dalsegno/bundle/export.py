"""`dalsegno export`: writes one request, with all that its replay needs, to a file (`bundle_file`).

It contains every record of the request and of its sibling parts, and the records of workers and epochs up to
the last of those.

It does not contain tensors (inline ones are in the events; others were freed with their request), the
workers' memory endpoints, and, without `--payloads`, the request's media and the answer's sound and images.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import msgspec

from conductor.digests import core_digest
from dalsegno.bundle import bundle_file, manifest, record_rewriter, redaction
from dalsegno.bundle.bundle_file import BundledRecord, ExportInfo, Header, LeftOut, LogExtent
from dalsegno.config import options
from dalsegno.history import log_source, request_media, seals
from dalsegno.history.log_source import LogSource
from dalsegno.history.request_media import RecordedMedium
from dalsegno.history.request_records import RequestRecords, collect
from dalsegno.terminal.sanitise import plain
from models import registry
from shared.errors import ClientError
from shared.events import OutputChunk, WorkerJoined, encode
from shared.log.port import StoredRecord
from shared.sealing import hashes, request_check
from shared.sealing.findings import Level
from shared.sealing.request_check import RequestReport

SUFFIX: Final = ".bundle"


@click.command()
@click.argument("request_id")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    help="The file; - is stdout. [default: REQUEST_ID.bundle in this folder]",
)
@click.option(
    "--payloads", is_flag=True, help="Include the request's media, and the answer's sound and images."
)
@click.option("--redact", is_flag=True, help="Replace inputs and answers by digests.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as one JSON object.")
@options.of_reader
def export(
    request_id: str,
    output: str | None,
    payloads: bool,
    redact: bool,
    as_json: bool,
    nats: str | None,
    data_dir: Path | None,
    prefix: str | None,
) -> None:
    """Write one request to a file that can be replayed anywhere.

    The file contains every event of REQUEST_ID, and of the workers and epochs it depends on. `dalsegno replay
    FILE` reads it.
    """
    if payloads and redact:
        raise click.UsageError("--payloads and --redact contradict one another: name one of them")
    source = LogSource(nats=nats, data_dir=data_dir, prefix=prefix)
    found, media = asyncio.run(_collected(source, request_id, with_media=payloads))
    header, kept = bundled(found, payloads=payloads, redact=redact)
    path = output or f"{request_id}{SUFFIX}"
    with target(path) as file:
        length = bundle_file.write(file, header, kept, _bytes_of(media))
    reports = request_check.check(
        found.requests,
        found.records,
        found.seals,
        found.subjects,
        seals.name_of(found.log, found.subjects),
        trusted=seals.trusted_keys(),
    )
    _say(path, header, kept, length, reports, as_json=as_json)
    _say_media(media, has_bytes=payloads)
    sys.exit(1 if any(report.level is Level.CHANGED for report in reports) else 0)


async def _collected(
    source: LogSource, request_id: str, *, with_media: bool
) -> tuple[RequestRecords, list[RecordedMedium]]:
    async with log_source.opened(source) as opened:
        found = await collect(opened.log, opened.subjects, request_id)
        if with_media:
            media = await request_media.collect_media(opened, found.records)
        else:
            media = request_media.named_media(found.records, opened.subjects)
    return msgspec.structs.replace(found, configs=log_source.configs(source)), media


def _bytes_of(media: Sequence[RecordedMedium]) -> dict[str, bytes]:
    return {one.medium.digest: one.data for one in media if one.data is not None}


def _say_media(media: Sequence[RecordedMedium], *, has_bytes: bool) -> None:
    """Name the media that the bundle lacks."""
    for one in media:
        if one.data is None:
            why = (
                "is gone: the media store no longer has it"
                if has_bytes
                else "is left out; --payloads keeps it"
            )
            name = one.medium.name or one.medium.digest[:16]
            click.echo(f"  {one.medium.modality} {plain(name)} ({one.medium.size:,} bytes) {why}", err=True)


def bundled(found: RequestRecords, *, payloads: bool, redact: bool) -> tuple[Header, list[BundledRecord]]:
    """Return the header and the records of a bundle.

    Raises:
        ClientError: a request of a family that is not installed here cannot be redacted.
    """
    records, unfaithful = found.records, dict[str, str]()
    if redact or any(_has_endpoints(record) for record in records):
        rewrite: redaction.Rewrite = redaction.without_endpoints
        if redact:
            rewrite = redaction.Redaction(redaction.admitted_in(records, found.subjects))
        records = record_rewriter.rewritten(
            records, rewrite, graph_of=registry.graph, subjects=found.subjects
        )
        unfaithful = record_rewriter.unfaithful(
            found.records, records, graph_of=registry.graph, subjects=found.subjects
        )
    kept = list(_kept(found.records, records, keeps_data=payloads or redact))
    if not redact:  # a redacted record is not the one that was sealed
        kept = _with_seals(kept, found.seals)
    header = Header(
        bundle=bundle_file.FORMAT,
        request_id=found.request_id,
        requests=found.requests,
        exported=ExportInfo(
            time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            version=version("dalsegno"),
            core=core_digest(),
        ),
        log=LogExtent(
            prefix=found.subjects.prefix,
            created_ns=found.log.created_ns,
            first_seq=found.log.first_seq,
            last_seq=found.log.last_seq,
        ),
        schemas=manifest.schemas(records, found.subjects),
        payloads="left out" if any(one.left_out is not None for one in kept) else "kept",
        redacted=redact,
        masked=any(one.digest is None for one in kept),
        unfaithful=unfaithful,
        damaged=found.damaged,
        configs=manifest.configs_in_force(records, found.subjects, found.configs),
        about=manifest.about(records, found.subjects, found.requests),
    )
    return header, kept


def _has_endpoints(record: StoredRecord) -> bool:
    event = manifest.event_of(record)
    return isinstance(event, WorkerJoined) and bool(event.cards)


def _kept(
    stored: Sequence[StoredRecord], records: Sequence[StoredRecord], *, keeps_data: bool
) -> Iterator[BundledRecord]:
    for was, record in zip(stored, records, strict=True):
        digest = bundle_file.digest_of(was.data) if record is was else None
        chunk = None if keeps_data or digest is None else manifest.event_of(record)
        data = chunk.data if isinstance(chunk, OutputChunk) else None
        if data is None:
            yield BundledRecord(record=record, digest=digest)
            continue
        assert isinstance(chunk, OutputChunk)
        shorter = encode(msgspec.structs.replace(chunk, data=None))
        left_out = LeftOut(bytes=len(data), digest=bundle_file.digest_of(data), leaf=hashes.leaf(was).hex())
        yield BundledRecord(
            record=msgspec.structs.replace(record, data=shorter), digest=digest, left_out=left_out
        )


def _with_seals(kept: Sequence[BundledRecord], seals: Sequence[StoredRecord]) -> list[BundledRecord]:
    own = [BundledRecord(record=seal, digest=bundle_file.digest_of(seal.data)) for seal in seals]
    return sorted((*kept, *own), key=lambda one: one.record.seq)


# ---- the file ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def target(path: str) -> Iterator[BinaryIO]:
    """Open a file that appears only when complete, readable by its user only: it has clients' text."""
    if path == bundle_file.STDIN:
        yield sys.stdout.buffer
        return
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
        draft.replace(target)
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _say(
    path: str,
    header: Header,
    kept: Sequence[BundledRecord],
    length: int,
    reports: Sequence[RequestReport],
    *,
    as_json: bool,
) -> None:
    to_stderr = path == bundle_file.STDIN
    source: dict[str, Any] = {"file": path, "bytes": length, "records": len(kept)}
    source |= {"requests": header.requests, "payloads": header.payloads, "redacted": header.redacted}
    source |= {"unfaithful": header.unfaithful, "damaged": header.damaged}
    source |= {"seals": {report.request_id: seals.as_plain(report) for report in reports}}
    if as_json:
        click.echo(json.dumps(source, ensure_ascii=False), err=to_stderr)
        return
    whose = header.request_id if len(header.requests) == 1 else f"{len(header.requests)} requests"
    click.echo(f"{path}: {len(kept)} events of {whose}, {length:,} bytes", err=to_stderr)
    if header.payloads == "left out":
        left = sum(one.left_out.bytes for one in kept if one.left_out is not None)
        click.echo(f"  {left:,} bytes of sound or images are left out; --payloads keeps them", err=to_stderr)
    for request_id, why in [*header.damaged.items(), *header.unfaithful.items()]:
        click.echo(f"  {request_id} cannot be replayed from it: {why}", err=to_stderr)
    if header.redacted:
        click.echo("  redacted: the seals of the log cannot cover it", err=to_stderr)
    for report in reports:
        for line in seals.lines(report):
            click.echo(f"  {report.request_id}: {plain(line)}", err=True)
