"""A seal: a statement about a segment of the log, and its signed form, the event `log.sealed.v1`.

The event contains the statement's exact bytes, so that no reader has to encode it again. A signature covers
`dalsegno.log.seal.v1`, a line feed and these bytes: the key's signatures cannot be used for anything else.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shared.events import LogSealed, MalformedEventError, decode
from shared.log.port import StoredRecord
from shared.sealing import keys
from shared.sealing.keys import SigningKey
from shared.subjects import CONDUCTOR_WRITER

FORMAT: Final = 1
_DOMAIN: Final = b"dalsegno.log.seal.v1\n"
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]


class SealedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one request from `first_seq` to `last_seq`: their number and their digest."""

    request_id: str
    first_seq: int
    last_seq: int
    count: int
    digest: Hash


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """A statement about the records from `first_seq` to `last_seq`.

    Attributes:
        format: of the statement.
        stream: the name of the log.
        created_ns: the log's creation time, which identifies it.
        max_age_s: the retention in force: younger records were not deleted by the log.
        sealed_since: the first position that was ever sealed; older records are not covered.
        count: the number of records in the segment.
        previous: the chain value of the segment before.
        chain: the chain value of this segment.
        previous_ns: the time of the last record of the segment before; 0 for the first segment.
        news_seq: the first record of this segment that is not a seal; `news_ns` is its time.
        last_ns: the time of this segment's last record.
        last_member: the position of the last membership record before this segment; 0 if there is none. So
            the seals that list such records are linked, and none can be left out.
        open_since: a successor that continues the chain has to read the log from here on.
        requests: requests that are over, with all their records that no earlier seal lists.
        members: the leaves of the records of workers and epochs, by position, without memory endpoints.
    """

    format: int = FORMAT
    stream: str
    created_ns: int
    max_age_s: float
    sealed_since: int
    first_seq: int
    last_seq: int
    count: int
    previous: Hash
    chain: Hash
    previous_ns: int
    news_seq: int
    news_ns: int
    last_ns: int
    last_member: int
    open_since: int
    requests: list[SealedRequest] = []
    members: dict[int, Hash] = {}


class SignedSeal(msgspec.Struct, frozen=True, kw_only=True):
    """A seal as it was found: `seq` is the position of its record, `key` the key that signed it."""

    seq: int
    seal: Seal
    key: bytes


class BadSealError(ValueError):
    """A record that is not a valid seal; the message says why.

    Attributes:
        is_foreign: it is no seal at all. Any client that may read can have the server's JSON stored on the
            subject of seals (ADR 11).
    """

    def __init__(self, message: str, *, is_foreign: bool = False) -> None:
        super().__init__(message)
        self.is_foreign = is_foreign


def signed(seal: Seal, key: SigningKey, epoch: int | None) -> LogSealed:
    """Return the event of a seal."""
    statement = msgspec.msgpack.encode(seal)
    return LogSealed(
        id=f"sealed.{seal.last_seq}",
        writer=CONDUCTOR_WRITER,
        epoch=epoch,
        statement=statement,
        key=key.public,
        signature=key.sign(_DOMAIN + statement),
    )


def read(record: StoredRecord) -> SignedSeal:
    """Return the seal in a record, after verifying its signature with the key it names.

    Raises:
        BadSealError: it is not a seal, of another format, or its signature is wrong.
    """
    try:
        event = decode(record.data)
    except MalformedEventError:
        raise BadSealError(f"record {record.seq} is not a seal", is_foreign=True) from None
    if not isinstance(event, LogSealed):
        raise BadSealError(f"record {record.seq} is not a seal", is_foreign=True)
    if not keys.is_signed(_DOMAIN + event.statement, event.signature, event.key):
        raise BadSealError(f"the signature of the seal in record {record.seq} is wrong")
    return SignedSeal(seq=record.seq, seal=_statement(event.statement, record.seq), key=event.key)


def described(event: LogSealed) -> str:
    """Return the content of a seal in words; its signature is not verified."""
    try:
        seal = msgspec.msgpack.decode(event.statement, type=Seal)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return f"a statement of {len(event.statement)} bytes that this version cannot read"
    return f"records {seal.first_seq} to {seal.last_seq}, by key {keys.fingerprint(event.key)}"


def _statement(data: bytes, seq: int) -> Seal:
    try:
        seal = msgspec.msgpack.decode(data, type=Seal)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadSealError(f"the statement of the seal in record {seq} cannot be read: {error}") from None
    if seal.format != FORMAT:
        raise BadSealError(f"the seal in record {seq} has format {seal.format}; this version reads {FORMAT}")
    if not seal.first_seq <= seal.last_seq < seq:
        raise BadSealError(f"the seal in record {seq} claims records {seal.first_seq} to {seal.last_seq}")
    return seal
