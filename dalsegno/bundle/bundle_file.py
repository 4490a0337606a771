"""A bundle: one request's records in a file that needs nothing else, and that shows when it was altered.

JSON, a line each: a header, the records in the order of the log, and a last line that says that it is the
last. `head`, `jq` and `diff` read it; nothing in it is ever executed.

    {"bundle":1,"request_id":"first",...,"chain":"9f0c..."}
    {"seq":17,"time_ns":1795178103000000000,"subject":"ds.request.first","event":{...},"digest":"...","chain":"..."}
    {"end":{"records":11},"chain":"..."}

`chain` is the last field of every line: BLAKE2b, 16 bytes in hex, over the chain of the line before (nothing,
before the first) and the line's own bytes up to the comma before `"chain"`. So no byte can be changed and no
line dropped or moved without its being seen at that line. `digest` is the same function of the record's bytes
as the log stores them: it tells which part of a line was altered, and holds every later version of this code
to giving back those bytes. A chain is no signature: whoever makes it anew is found by the replay, where he is
found at all.

What a record's bytes look like in JSON is `dalsegno.bundle.json_form`'s.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import msgspec

from dalsegno.bundle import json_form
from shared.errors import ClientError
from shared.log.port import StoredRecord
from shared.subjects import Subjects

FORMAT: Final = 1
MAX_LINE_BYTES: Final = 128 * 1024 * 1024
"""More than any event can have: a NATS server takes 64 MiB of one at the very most."""
MAX_BUNDLE_BYTES: Final = 4 * 1024 * 1024 * 1024
STDIN: Final = "-"

_CHAIN: Final = re.compile(rb',"chain":"([0-9a-f]{32})"}\n\Z')
_CHAIN_BYTES: Final = len(',"chain":""}\n') + 32


class BundleError(ClientError):
    """A file that is no whole bundle of ours; says which line, and what is wrong with it."""

    code = "bundle"


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """The `data` of a chunk that is not in the bundle: how long it was, and its digest."""

    bytes: int
    digest: str


class BundledRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record in a bundle.

    Attributes:
        record: as the log has it; `left_out` says of a chunk what it has not.
        digest: of the bytes in the log; None where other bytes stand here in their place.
    """

    record: StoredRecord
    digest: str | None
    left_out: LeftOut | None = None


class ExportInfo(msgspec.Struct, frozen=True, kw_only=True):
    """When the bundle was written, by which version, and which core that has."""

    time: str
    version: str
    core: str


class LogExtent(msgspec.Struct, frozen=True, kw_only=True):
    """The log it was taken from: its prefix, when it was made, and what it held then."""

    prefix: str
    created_ns: int
    first_seq: int
    last_seq: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle's first line. Whoever replays reads the records; most of this is for people.

    Attributes:
        request_id: whose bundle it is; `requests` are that one and the other parts of its question.
        schemas: the types of event that are in it, with their versions.
        redacted: what the client wrote and what was answered is not in it.
        masked: other bytes than the log's stand in it, for what lets one worker read another's tensors.
        unfaithful: requests that this bundle cannot be replayed for, and why.
        configs: by digest, the configuration as far as it was known, without secrets.
        about: of each request what its records say, put together.
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
    configs: dict[str, Any] = {}
    about: list[dict[str, Any]] = []


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A whole bundle, as it was written."""

    header: Header
    kept: list[BundledRecord]

    @property
    def records(self) -> list[StoredRecord]:
        return [one.record for one in self.kept]

    @property
    def unheard(self) -> frozenset[str]:
        """Requests of whose chunks not all bytes are in it."""
        subjects = Subjects(self.header.log.prefix)
        found = (subjects.parse(one.record.subject) for one in self.kept if one.left_out is not None)
        return frozenset(str(address.request_id) for address in found if address is not None)


def digest_of(data: bytes) -> str:
    """Of a record's bytes, or of a payload. Hex, 32 characters; `b2sum -l 128` gives the same."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# ---- writing -------------------------------------------------------------------------------------------


def write(file: BinaryIO, header: Header, kept: Iterable[BundledRecord]) -> int:
    """Write a bundle; return its length in bytes."""
    chain, length, records = "", 0, 0
    for content in _contents(header, kept):
        if "seq" in content:
            records += 1
        if "end" in content:
            content["end"]["records"] = records
        line, chain = _chained(chain, content)
        file.write(line)
        length += len(line)
    return length


def _contents(header: Header, kept: Iterable[BundledRecord]) -> Iterator[dict[str, Any]]:
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
    yield {"end": {"records": 0}}


def _chained(chain: str, content: dict[str, Any]) -> tuple[bytes, str]:
    body = msgspec.json.encode(content)[:-1]
    chain = digest_of(chain.encode() + body)
    return body + f',"chain":"{chain}"}}\n'.encode(), chain


# ---- reading -------------------------------------------------------------------------------------------


def read(path: str) -> Bundle:
    """Read a bundle from a file, or from stdin where `path` is `-`.

    Raises:
        BundleError: it is none, or it is not as it was written: the message says where.
    """
    with _opened(path) as file:
        return read_from("stdin" if path == STDIN else path, file)


def read_from(name: str, file: BinaryIO) -> Bundle:
    """Read a bundle; `name` is what messages call it.

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
            raise BundleError(f"{path} has more than {MAX_BUNDLE_BYTES:,} bytes: that is no bundle")
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
        while (line := self._line()) is not None:
            content = self._checked(line)
            if "end" in content:
                self._end(content, len(kept))
                return Bundle(header=header, kept=kept)
            kept.append(self._kept(content, line, kept))
        raise BundleError(
            f"{self._name} is cut off: it ends behind line {self._number}, and its last line is missing"
        )

    # ---- by kind of line ---------------------------------------------------------------------------
    def _header(self, line: bytes) -> Header:
        try:
            content = msgspec.json.decode(line, type=dict[str, Any])
            told = content["bundle"]
        except (msgspec.MsgspecError, ValueError, RecursionError, KeyError):
            self._refuse_cut(line)
            raise BundleError(
                f"{self._name} is no bundle: expected `dalsegno export`'s first line, "
                f'{{"bundle":{FORMAT},...}}, found {line[:60]!r}'
            ) from None
        if told != FORMAT:
            by = (content.get("exported") or {}).get("version", "another version")
            sure = "is" if self._next_chain(line) else "is altered in line 1, or is"
            raise BundleError(
                f"{self._name} {sure} a bundle of format {told!r:.40}; this version "
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
            told = msgspec.convert([seq, time_ns, subject], tuple[int, int, str])
            digest = msgspec.convert(content.pop("digest", None), str | None)
            left_out = msgspec.convert(content.pop("left_out", None), LeftOut | None)
            data = json_form.data_of(content)
        except KeyError as error:
            self._refuse(f"expected a record, with the field {error}")
        except (msgspec.ValidationError, json_form.UnreadableFormError) as error:
            self._refuse(f"{_called(line)} cannot be read: {error}")
        if digest is not None and left_out is None and digest_of(data) != digest:
            self._refuse(f"{_called(line)} has another digest than its bytes")
        if before and told[0] <= before[-1].record.seq:
            self._refuse(f"{_called(line)} does not stand behind record {before[-1].record.seq}")
        return BundledRecord(
            record=StoredRecord(told[0], told[2], data, told[1]), digest=digest, left_out=left_out
        )

    def _end(self, content: dict[str, Any], records: int) -> None:
        if content["end"] != {"records": records}:
            self._refuse(f"the last line counts {content['end']!r:.80}; there are {records} records")
        if self._file.read(1):
            raise BundleError(f"{self._name}: something follows line {self._number}, which is its last")

    # ---- the chain ---------------------------------------------------------------------------------
    def _line(self) -> bytes | None:
        line = self._file.readline(MAX_LINE_BYTES)
        if not line:
            return None
        self._number += 1
        self._read += len(line)
        if len(line) == MAX_LINE_BYTES or self._read > MAX_BUNDLE_BYTES:
            self._refuse("longer than any line of a bundle is")
        return line

    def _checked(self, line: bytes) -> dict[str, Any]:
        """What a line says, which is what was written."""
        chain = self._next_chain(line)
        if chain is None:
            self._refuse_cut(line)
            self._refuse(f"not as it was exported: {self._blame(line)}")
        self._chain = chain
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # chained by somebody else
            self._refuse(f"cannot be read: {error}")

    def _next_chain(self, line: bytes) -> str | None:
        """The chain of a line that is as it was written, behind those before it."""
        told = _CHAIN.search(line)
        chain = digest_of(self._chain.encode() + line[:-_CHAIN_BYTES])
        return chain if told is not None and told[1].decode() == chain else None

    def _blame(self, line: bytes) -> str:
        """Which part of a line was altered, as far as that can be told."""
        follower = self._file.readline(MAX_LINE_BYTES)
        told, known = _CHAIN.search(follower), self._chain
        own = digest_of(known.encode() + line[:-_CHAIN_BYTES])
        if told is not None and told[1].decode() == digest_of(own.encode() + follower[:-_CHAIN_BYTES]):
            return f"the chain of {_called(line)}"
        try:
            content = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return f"{_called(line)}, which is no JSON any more"
        if "digest" not in content or "left_out" in content:
            return _called(line)
        form = {name: value for name, value in content.items() if name not in _BESIDE}
        try:
            is_same = digest_of(json_form.data_of(form)) == content["digest"]
        except json_form.UnreadableFormError:
            is_same = False
        part = "the position, time or subject" if is_same else "the event, or its digest,"
        return f"{part} of {_called(line)}"

    def _refuse_cut(self, line: bytes) -> None:
        if not line.endswith(b"\n") and not self._file.read(1):
            raise BundleError(f"{self._name} is cut off in line {self._number}")

    def _refuse(self, problem: str) -> NoReturn:
        raise BundleError(f"{self._name}, line {self._number}: {problem}")


_BESIDE: Final = frozenset({"seq", "time_ns", "subject", "digest", "left_out", "chain"})
"""What a line has beside its record's bytes."""
_NAMED: Final = {
    name: re.compile(rb'"' + name.encode() + rb'":(?:"([^"\\]{1,300})"|(\d{1,20}))')
    for name in ("seq", "subject", "type")
}


def _called(line: bytes) -> str:
    """What a line is of, for people, however broken it is."""
    if line.startswith(b'{"bundle"'):
        return "the header"
    if line.startswith(b'{"end"'):
        return "the last line"
    found = {
        name: (told[1] or told[2]).decode(errors="replace")
        for name, pattern in _NAMED.items()
        if (told := pattern.search(line)) is not None
    }
    what = f" ({found['type']})" if "type" in found else ""
    return f"record {found.get('seq', '?')} on {found.get('subject', '?')}{what}"
