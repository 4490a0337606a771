"""The media of recorded requests, from the media store of their log."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress

import msgspec

from dalsegno.history.log_source import OpenedLog
from shared.events import MalformedEventError, Media, RequestSubmitted
from shared.log.port import StoredRecord
from shared.media.store import MediaCorruptError, MediaGoneError, MediaStore
from shared.subject_rules import read_event
from shared.subjects import Subjects


class RecordedMedium(msgspec.Struct, frozen=True, kw_only=True):
    """A medium that a request names.

    Attributes:
        tenant: the request's.
        data: the bytes; None if they are gone.
    """

    medium: Media
    tenant: str | None
    data: bytes | None = None


@asynccontextmanager
async def open_media(source: OpenedLog) -> AsyncGenerator[MediaStore, None]:
    """Connect to the media store beside an open log."""
    from shared.media import jetstream

    store = await jetstream.connect(
        source.url, credentials=source.credentials, subjects=source.subjects, name="reader"
    )
    try:
        yield store
    finally:
        await store.close()


def with_bytes(named: Iterable[RecordedMedium], data: Mapping[str, bytes]) -> list[RecordedMedium]:
    """Return media with their bytes, by digest, where there are any."""
    return [msgspec.structs.replace(one, data=data.get(one.medium.digest)) for one in named]


def named_media(records: Iterable[StoredRecord], subjects: Subjects) -> list[RecordedMedium]:
    """Return the media that the requests among records name, each once per tenant, without their bytes."""
    found: dict[tuple[str | None, str], RecordedMedium] = {}
    for record in records:
        with suppress(MalformedEventError):
            _, event = read_event(record, subjects)
            if isinstance(event, RequestSubmitted):
                for medium in event.inputs.files:
                    one = RecordedMedium(medium=medium, tenant=event.tenant)
                    found.setdefault((event.tenant, medium.digest), one)
    return list(found.values())


async def collect_media(source: OpenedLog, records: Iterable[StoredRecord]) -> list[RecordedMedium]:
    """Read the media that the requests among records name; those that are gone come without bytes.

    Raises:
        MediaStoreUnavailableError: the server does not answer.
    """
    named = named_media(records, source.subjects)
    if not named:
        return []
    async with open_media(source) as store:
        return [msgspec.structs.replace(one, data=await _bytes_of(one, store)) for one in named]


async def _bytes_of(one: RecordedMedium, store: MediaStore) -> bytes | None:
    with suppress(MediaGoneError, MediaCorruptError):
        async with aclosing(store.read(one.medium.digest, tenant=one.tenant)) as pieces:
            return b"".join([piece async for piece in pieces])
    return None
