"""The bundle file: one request's records, self-contained, with digests that reveal any change.

The file is JSON lines: a header, the records in log order, and a last line that marks the end. `head`, `jq`
and `diff` can read it; nothing in it is ever executed.

    {"bundle":1,"request_id":"first",...,"chain":"9f0c..."}
    {"seq":17,"time_ns":1795178103000000000,"subject":"ds.request.first","event":{...},"digest":"...","chain":"..."}
    {"medium":"<SHA-256>","data":"<base64>","chain":"..."}
    {"end":{"records":11},"chain":"..."}

The lines of media follow the records, if their bytes are in the bundle: each medium once, in pieces.

`chain` is the last field of every line: BLAKE2b, 16 bytes in hex, over the chain of the previous line
(nothing, for the first) and the line's own bytes up to the comma before `"chain"`. So a changed byte, or a
dropped or moved line, is detected at that line. `digest` is the same function over the record's bytes as the
log stores
them: it shows which part of a line was altered, and requires every later version of this code to reproduce
those bytes. A
chain is not a signature: a file with a recomputed chain is detected by the replay, if at all.

`dalsegno.bundle.json_form` defines the JSON form of a record's bytes.
"""

import base64
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NoReturn

import msgspec

from dalsegno.bundle import json_form
from shared.errors import ClientError
from shared.log.port import StoredRecord
from shared.subjects import Subjects

FORMAT: Final = 1
MAX_LINE_BYTES: Final = 128 * 1024 * 1024
"""More than any event has: a NATS server accepts at most 64 MiB."""
MAX_BUNDLE_BYTES: Final = 4 * 1024 * 1024 * 1024
STDIN: Final = "-"
_PIECE_BYTES: Final = 1 << 20

_CHAIN: Final = re.compile(rb',"chain":"([0-9a-f]{32})"}\n\Z')
_CHAIN_BYTES: Final = len(',"chain":""}\n') + 32


class BundleError(ClientError):
    """The file is not a complete bundle; the message names the line and the problem."""

    code = "bundle"


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """The `data` of a chunk that is not in the bundle: its length and digest.

    Attributes:
        leaf: the hash of the whole record, as seals use it, in hex.
    """

    bytes: int
    digest: str
    leaf: str = ""


class BundledRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record in a bundle.

    Attributes:
        record: the log's record, without the data described by `left_out`.
        digest: of the log's bytes; None if the bundle has other bytes in their place.
    """

    record: StoredRecord
    digest: str | None
    left_out: LeftOut | None = None


class ExportInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The export: its time, the version that wrote it, and the digest of that version's core."""

    time: str
    version: str
    core: str


class LogExtent(msgspec.Struct, frozen=True, kw_only=True):
    """The source log: its prefix, its creation time, and the positions it held."""

    prefix: str
    created_ns: int
    first_seq: int
    last_seq: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle's first line. A replay reads the records; most of the header is for people.

    Attributes:
        request_id: the exported request; `requests` are its id and those of its sibling parts.
        schemas: the event types in the bundle, with their versions.
        redacted: the client's text and the answers are replaced.
        masked: some records have other bytes than the log's, in place of memory endpoints.
        unfaithful: requests that this bundle cannot replay, with the reason.
        damaged: requests of which the log, and so this bundle, may lack records, with the reason.
        configs: by digest, the configuration as far as it is known, without secrets.
        about: a summary of each request's records.
    """

    bundle: int
    request_id: str
    requests: list[str]
    exported: ExportInfo
    log: LogExtent
    schemas: list[str] = []
    payloads: str = "kept"
    redacted: bool = False
    masked: bool = False
    unfaithful: dict[str, str] = {}
    damaged: dict[str, str] = {}
    configs: dict[str, Any] = {}
    about: list[dict[str, Any]] = []


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A complete bundle.

    Attributes:
        media: by digest, the bytes of the media that the requests name, as far as they are in the bundle.
    """

    header: Header
    kept: list[BundledRecord]
    media: dict[str, bytes] = {}

    @property
    def records(self) -> list[StoredRecord]:
        """The records, without the seals of the log."""
        return [one.record for one in self.kept if one.record.subject != self._sealed]

    @property
    def seals(self) -> list[StoredRecord]:
        """The seals that cover the records."""
        return [one.record for one in self.kept if one.record.subject == self._sealed]

    @property
    def _sealed(self) -> str:
        return Subjects(self.header.log.prefix).sealed

    @property
    def incomplete(self) -> frozenset[str]:
        """The requests whose chunks lack some of their bytes."""
        subjects = Subjects(self.header.log.prefix)
        found = (subjects.parse(one.record.subject) for one in self.kept if one.left_out is not None)
        return frozenset(str(address.request_id) for address in found if address is not None)


def digest_of(data: bytes) -> str:
    """The digest of a record's bytes or of a payload: hex, 32 characters, as `b2sum -l 128` prints it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# ---- writing -------------------------------------------------------------------------------------------


def write(
    file: BinaryIO,
    header: Header,
    kept: Iterable[BundledRecord],
    media: Mapping[str, bytes] = MappingProxyType({}),
) -> int:
    """Write a bundle, with these media by digest; return its length in bytes."""
    chain, length, records = "", 0, 0
    for content in _contents(header, kept, media):
        if "seq" in content:
            records += 1
        if "end" in content:
            content["end"]["records"] = records
        line, chain = _chained(chain, content)
        file.write(line)
        length += len(line)
    return length


def _contents(
    header: Header, kept: Iterable[BundledRecord], media: Mapping[str, bytes]
) -> Iterator[dict[str, Any]]:
    yield msgspec.to_builtins(header)
    for one in kept:
        record = one.record
        content: dict[str, Any] = {"seq": record.seq, "time_ns": record.time_ns, "subject": record.subject}
        content |= json_form.form_of(record.data)
        if one.digest is not None:
            content["digest"] = one.digest
        if one.left_out is not None:
            content["left_out"] = msgspec.to_builtins(one.left_out)
        yield content
    for digest, data in media.items():
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            yield {"medium": digest, "data": base64.b64encode(piece).decode()}
    yield {"end": {"records": 0}}


def _chained(chain: str, content: dict[str, Any]) -> tuple[bytes, str]:
    body = msgspec.json.encode(content)[:-1]
    chain = digest_of(chain.encode() + body)
    return body + f',"chain":"{chain}"}}\n'.encode(), chain


# ---- reading -------------------------------------------------------------------------------------------


def read(path: str) -> Bundle:
    """Read a bundle from a file, or from stdin if `path` is `-`.

    Raises:
        BundleError: it is not a bundle, or it was altered; the message says where.
    """
    with _opened(path) as file:
        return read_from("stdin" if path == STDIN else path, file)


def read_from(name: str, file: BinaryIO) -> Bundle:
    """Read a bundle; messages call it `name`.

    Raises:
        BundleError: as `read`.
    """
    return _Reading(name, file).bundle()


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        if Path(path).stat().st_size > MAX_BUNDLE_BYTES:
            raise BundleError(f"{path} has more than {MAX_BUNDLE_BYTES:,} bytes: it is not a bundle")
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error


class _Reading:
    """One pass over a file, line by line."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self._name = name
        self._file = file
        self._number = 0
        self._read = 0
        self._chain = ""

    def bundle(self) -> Bundle:
        first = self._line()
        if first is None:
            raise BundleError(f"{self._name} is empty: expected a bundle, as `dalsegno export` writes it")
        header = self._header(first)
        kept: list[BundledRecord] = []
        media: dict[str, bytearray] = {}
        while (line := self._line()) is not None:
            content = self._checked(line)
            if "end" in content:
                self._end(content, len(kept))
                return Bundle(header=header, kept=kept, media=self._media(media))
            if "medium" in content:
                self._medium(content, media)
                continue
            kept.append(self._kept(content, line, kept))
        raise BundleError(
            f"{self._name} is cut off: it ends after line {self._number}, and its last line is missing"
        )

    # ---- by kind of line ---------------------------------------------------------------------------
    def _header(self, line: bytes) -> Header:
        try:
            content = msgspec.json.decode(line, type=dict[str, Any])
            format_ = content["bundle"]
        except (msgspec.MsgspecError, ValueError, RecursionError, KeyError):
            self._refuse_cut(line)
            raise BundleError(
                f"{self._name} is not a bundle: expected `dalsegno export`'s first line, "
                f'{{"bundle":{FORMAT},...}}, found {line[:60]!r}'
            ) from None
        if format_ != FORMAT:
            by = (content.get("exported") or {}).get("version", "another version")
            sure = "is" if self._next_chain(line) else "is altered in line 1, or is"
            raise BundleError(
                f"{self._name} {sure} a bundle of format {format_!r:.40}; this version "
                f"({version('dalsegno')}) reads format {FORMAT}: read it with dalsegno {by!s:.40}"
            )
        content = self._checked(line)
        try:
            return msgspec.convert(content, Header)
        except msgspec.ValidationError as error:
            self._refuse(f"the header cannot be read: {error}")

    def _kept(self, content: dict[str, Any], line: bytes, before: Sequence[BundledRecord]) -> BundledRecord:
        try:
            seq, time_ns, subject = content.pop("seq"), content.pop("time_ns"), content.pop("subject")
            fields = msgspec.convert([seq, time_ns, subject], tuple[int, int, str])
            digest = msgspec.convert(content.pop("digest", None), str | None)
            left_out = msgspec.convert(content.pop("left_out", None), LeftOut | None)
            data = json_form.data_of(content)
        except KeyError as error:
            self._refuse(f"expected a record, with the field {error}")
        except (msgspec.ValidationError, json_form.UnreadableFormError) as error:
            self._refuse(f"{_description_of(line)} cannot be read: {error}")
        if digest is not None and left_out is None and digest_of(data) != digest:
            self._refuse(f"{_description_of(line)} has a digest that does not match its bytes")
        if before and fields[0] <= before[-1].record.seq:
            self._refuse(f"{_description_of(line)} does not follow record {before[-1].record.seq}")
        return BundledRecord(
            record=StoredRecord(fields[0], fields[2], data, fields[1]), digest=digest, left_out=left_out
        )

    def _medium(self, content: dict[str, Any], media: dict[str, bytearray]) -> None:
        try:
            digest, data = msgspec.convert([content["medium"], content["data"]], tuple[str, str])
            media.setdefault(digest, bytearray()).extend(base64.b64decode(data, validate=True))
        except (KeyError, ValueError) as error:
            self._refuse(f"expected a piece of a medium: {error}")

    def _media(self, media: Mapping[str, bytearray]) -> dict[str, bytes]:
        for digest, data in media.items():
            if hashlib.sha256(data).hexdigest() != digest:
                self._refuse(f"the medium {digest[:80]} has a digest that does not match its bytes")
        return {digest: bytes(data) for digest, data in media.items()}

    def _end(self, content: dict[str, Any], records: int) -> None:
        if content["end"] != {"records": records}:
            self._refuse(f"the last line counts {content['end']!r:.80}; there are {records} records")
        if self._file.read(1):
            raise BundleError(f"{self._name}: expected nothing after line {self._number}, its last line")

    # ---- the chain ---------------------------------------------------------------------------------
    def _line(self) -> bytes | None:
        line = self._file.readline(MAX_LINE_BYTES)
        if not line:
            return None
        self._number += 1
        self._read += len(line)
        if len(line) == MAX_LINE_BYTES or self._read > MAX_BUNDLE_BYTES:
            self._refuse("longer than any line of a bundle")
        return line

    def _checked(self, line: bytes) -> dict[str, Any]:
        """Decode a line after verifying its chain."""
        chain = self._next_chain(line)
        if chain is None:
            self._refuse_cut(line)
            self._refuse(f"not as it was exported: {self._blame(line)}")
        self._chain = chain
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a recomputed chain
            self._refuse(f"cannot be read: {error}")

    def _next_chain(self, line: bytes) -> str | None:
        """The chain of a line that is unaltered and follows the lines before it; else None."""
        chain_field = _CHAIN.search(line)
        chain = digest_of(self._chain.encode() + line[:-_CHAIN_BYTES])
        return chain if chain_field is not None and chain_field[1].decode() == chain else None

    def _blame(self, line: bytes) -> str:
        """Name the altered part of a line, as far as it can be determined."""
        follower = self._file.readline(MAX_LINE_BYTES)
        chain_field, known = _CHAIN.search(follower), self._chain
        own = digest_of(known.encode() + line[:-_CHAIN_BYTES])
        if chain_field is not None and chain_field[1].decode() == digest_of(
            own.encode() + follower[:-_CHAIN_BYTES]
        ):
            return f"the chain of {_description_of(line)}"
        try:
            content = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return f"{_description_of(line)}, which is not JSON"
        if "digest" not in content or "left_out" in content:
            return _description_of(line)
        form = {name: value for name, value in content.items() if name not in _OTHER_FIELDS}
        try:
            is_same = digest_of(json_form.data_of(form)) == content["digest"]
        except json_form.UnreadableFormError:
            is_same = False
        part = "the position, time or subject" if is_same else "the event, or its digest,"
        return f"{part} of {_description_of(line)}"

    def _refuse_cut(self, line: bytes) -> None:
        if not line.endswith(b"\n") and not self._file.read(1):
            raise BundleError(f"{self._name} is cut off in line {self._number}")

    def _refuse(self, problem: str) -> NoReturn:
        raise BundleError(f"{self._name}, line {self._number}: {problem}")


_OTHER_FIELDS: Final = frozenset({"seq", "time_ns", "subject", "digest", "left_out", "chain"})
"""A line's fields other than the form of its record's bytes."""
_NAMED: Final = {
    name: re.compile(rb'"' + name.encode() + rb'":(?:"([^"\\]{1,300})"|(\d{1,20}))')
    for name in ("seq", "subject", "type")
}


def _description_of(line: bytes) -> str:
    """A description of a line for messages, however broken it is."""
    if line.startswith(b'{"bundle"'):
        return "the header"
    if line.startswith(b'{"end"'):
        return "the last line"
    found = {
        name: (match[1] or match[2]).decode(errors="replace")
        for name, pattern in _NAMED.items()
        if (match := pattern.search(line)) is not None
    }
    what = f" ({found['type']})" if "type" in found else ""
    return f"record {found.get('seq', '?')} on {found.get('subject', '?')}{what}"
