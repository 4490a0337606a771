"""`dalsegno export`: one request, and all that its replay needs, into a file (`dalsegno.bundle.bundle_file`).

What is in it: every record of the request, of the other parts of its question where it has several, and the
world's (lives of workers, terms of conductors) up to the last of those.

What is not: the tensors (those that rode inline are in the events; the others are gone with their request),
what lets one worker read another's tensors, and, unless `--payloads` asks for them, the sound and images of
the answer.
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
from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.history.request_records import RequestRecords, collect
from models import registry
from shared.errors import ClientError
from shared.events import OutputChunk, WorkerJoined, encode
from shared.log.port import StoredRecord

SUFFIX: Final = ".bundle"


@click.command()
@click.argument("request_id")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    help="Where to; - is stdout. [default: REQUEST_ID.bundle, here]",
)
@click.option("--payloads", is_flag=True, help="With the sound and images of the answer.")
@click.option("--redact", is_flag=True, help="With digests in the place of what was asked and answered.")
@click.option("--json", "as_json", is_flag=True, help="Say what was written as one JSON object.")
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
    """Write one request into a file that can be replayed anywhere.

    The file has every event of REQUEST_ID and of the world it depends on. `dalsegno replay FILE` takes it.
    """
    if payloads and redact:
        raise click.UsageError("--payloads and --redact contradict one another: name one of them")
    told = LogSource(nats=nats, data_dir=data_dir, prefix=prefix)
    found = asyncio.run(_collected(told, request_id))
    header, kept = bundled(found, payloads=payloads, redact=redact)
    path = output or f"{request_id}{SUFFIX}"
    with _target(path) as file:
        length = bundle_file.write(file, header, kept)
    _say(path, header, kept, length, as_json=as_json)


async def _collected(told: LogSource, request_id: str) -> RequestRecords:
    async with log_source.open_log(told) as (log, subjects):
        found = await collect(log, subjects, request_id)
    return msgspec.structs.replace(found, configs=log_source.configs(told))


def bundled(found: RequestRecords, *, payloads: bool, redact: bool) -> tuple[Header, list[BundledRecord]]:
    """The header and the records of a bundle.

    Raises:
        ClientError: nothing can be redacted of a family that is not installed here.
    """
    records, unfaithful = found.records, dict[str, str]()
    if redact or any(_has_cards(record) for record in records):
        rewrite: redaction.Rewrite = redaction.without_cards
        if redact:
            rewrite = redaction.Redaction(redaction.admitted_in(records, found.subjects))
        records = record_rewriter.rewritten(
            records, rewrite, graph_of=registry.graph, subjects=found.subjects
        )
        unfaithful = record_rewriter.unfaithful(
            found.records, records, graph_of=registry.graph, subjects=found.subjects
        )
    kept = list(_kept(found.records, records, keeps_data=payloads or redact))
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
        configs=manifest.configs_in_force(records, found.subjects, found.configs),
        about=manifest.about(records, found.subjects, found.requests),
    )
    return header, kept


def _has_cards(record: StoredRecord) -> bool:
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
        left_out = LeftOut(bytes=len(data), digest=bundle_file.digest_of(data))
        yield BundledRecord(
            record=msgspec.structs.replace(record, data=shorter), digest=digest, left_out=left_out
        )


# ---- the file ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _target(path: str) -> Iterator[BinaryIO]:
    """A file that is whole or not there, and that only its user can read: it has what a client wrote."""
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


def _say(path: str, header: Header, kept: Sequence[BundledRecord], length: int, *, as_json: bool) -> None:
    to_stderr = path == bundle_file.STDIN
    told: dict[str, Any] = {"file": path, "bytes": length, "records": len(kept)}
    told |= {"requests": header.requests, "payloads": header.payloads, "redacted": header.redacted}
    told |= {"unfaithful": header.unfaithful}
    if as_json:
        click.echo(json.dumps(told, ensure_ascii=False), err=to_stderr)
        return
    whose = header.request_id if len(header.requests) == 1 else f"{len(header.requests)} requests"
    click.echo(f"{path}: {len(kept)} events of {whose}, {length:,} bytes", err=to_stderr)
    if header.payloads == "left out":
        left = sum(one.left_out.bytes for one in kept if one.left_out is not None)
        click.echo(f"  {left:,} bytes of sound or images are left out; --payloads keeps them", err=to_stderr)
    for request_id, why in header.unfaithful.items():
        click.echo(f"  {request_id} cannot be replayed from it: {why}", err=to_stderr)
