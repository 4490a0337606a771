"""The hashes in seals: SHA-256, each kind with a prefix of its own.

leaf     of a record: prefix, "<seq> <time_ns> <length of the subject> ", subject, bytes
chain    of a segment: prefix, the previous chain value, the leaves in log order
request  of a request's records: prefix, their leaves in log order
"""

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from shared.events import MalformedEventError, WorkerJoined, decode, encode
from shared.log.port import StoredRecord

if TYPE_CHECKING:
    from hashlib import _Hash

_RECORD: Final = b"dalsegno.record.v1\n"
_CHAIN: Final = b"dalsegno.chain.v1\n"
_REQUEST: Final = b"dalsegno.request.v1\n"
BEGINNING: Final = bytes(32)
"""The chain value before the first segment."""


def leaf(record: StoredRecord) -> bytes:
    """Return the hash of a record: its position, its time of storage, its subject and its bytes."""
    subject = record.subject.encode(errors="surrogatepass")
    head = b"%d %d %d " % (record.seq, record.time_ns, len(subject))
    return hashlib.sha256(b"".join((_RECORD, head, subject, record.data))).digest()


def chain_after(previous: bytes) -> "_Hash":
    """Return the hash of a segment's chain value, to be updated with the segment's leaves."""
    return hashlib.sha256(_CHAIN + previous)


def of_request() -> "_Hash":
    """Return the hash of a request's records, to be updated with their leaves."""
    return hashlib.sha256(_REQUEST)


def without_endpoints(record: StoredRecord) -> StoredRecord:
    """Return a membership record as bundles show it: without memory endpoints of workers."""
    try:
        event = decode(record.data)
    except MalformedEventError:
        return record
    if not isinstance(event, WorkerJoined) or not event.cards:
        return record
    return msgspec.structs.replace(record, data=encode(msgspec.structs.replace(event, cards={})))
