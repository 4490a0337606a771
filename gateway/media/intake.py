"""Intake: the media of one request, from their sources into the store.

Two phases, so that a refused request leaves nothing behind: first all media are loaded, identified and
checked, then they are stored. The request is submitted after the store's acks.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import msgspec

from gateway.errors import InvalidParamError
from gateway.http.forms import FormLimits
from gateway.media import parts, spool
from gateway.media.content_kinds import HEAD_BYTES, ContentKind, check_json_lines, kind_of, mismatch
from gateway.media.remote import RemoteMedia
from gateway.media.sources import InlineSource, MediaSource, RemoteSource, StoredSource, UploadedSource
from gateway.media.spool import Spool
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.service import Gateway
from shared.errors import ClientError
from shared.events import Inputs, Media
from shared.media.store import MediaStore, StoredMedium


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedMedium:
    """A medium that may be stored.

    Attributes:
        content: its bytes; None if the store has it already.
    """

    source: MediaSource
    medium: Media
    content: Spool | None


class MediaIntake:
    """The intake of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.settings = gateway.media_settings
        self._gateway = gateway
        self._served = gateway.served
        self._remote = RemoteMedia(gateway.media_settings)

    @property
    def form_limits(self) -> FormLimits:
        """The limits of forms: their text is held in memory, as other bodies are."""
        return FormLimits(files=self.settings.max_files, text_bytes=self._gateway.settings.max_body_bytes)

    @property
    def store(self) -> MediaStore:
        """The media store.

        Raises:
            LogUnavailableError: this gateway has no connection to its log.
        """
        return self._gateway.connection.media

    def check_modality(self, modality: str, where: str, name: str | None = None) -> None:
        """Refuse a modality that the model does not take; empty is any. `name` is that of a file.

        Raises:
            InvalidParamError: the model does not take it.
        """
        taken = self._served.modalities
        is_taken = modality in taken if modality else self._served.takes_media
        if not is_taken:
            raise InvalidParamError(
                where,
                f"{where}: the model {self._served.name!r} takes {', '.join(taken)} only, "
                f"found {modality or 'a file'}{f' ({name})' if name else ''}",
                code="unsupported_modality",
            )

    def check_sources(self, sources: Sequence[MediaSource]) -> None:
        """Check what needs no bytes: the number of media, their modalities, and the hosts of addresses.

        Raises:
            InvalidParamError: there are too many, or one cannot be taken.
        """
        if len(sources) > self.settings.max_files:
            where = sources[self.settings.max_files].where
            raise InvalidParamError(
                where,
                f"{where}: expected at most {self.settings.max_files} files in a request (media.max_files), "
                f"found {len(sources)}",
                code="too_many_files",
            )
        for source in sources:
            self.check_modality(source.modality, source.where, source.name)
            if isinstance(source, RemoteSource):
                self._remote.check(source)

    async def attach(
        self, requests: Sequence[ParsedRequest], sources: Sequence[MediaSource]
    ) -> list[ParsedRequest]:
        """Store the media of a request, whose choices are `requests`; return the choices with them.

        Raises:
            ClientError: a medium cannot be taken; the error names its place in the body.
            CapacityError: this gateway takes no requests now, or the store no media.
        """
        if not sources:
            return list(requests)
        self.check_sources(sources)
        store = self._gateway.check_open().media
        files = await self._stored(sources, requests[0].tenant, store)
        return [replace(one, inputs=with_files(one.inputs, files)) for one in requests]

    async def _stored(
        self, sources: Sequence[MediaSource], tenant: str | None, store: MediaStore
    ) -> list[Media]:
        async with self.checked(sources, tenant, store) as media:
            for one in media:
                await self._store(one, tenant, store)
            return [one.medium for one in media]

    @asynccontextmanager
    async def checked(
        self, sources: Sequence[MediaSource], tenant: str | None, store: MediaStore
    ) -> AsyncGenerator[list[CheckedMedium], None]:
        """Load and check all media; their bytes are freed at the end of the block."""
        async with AsyncExitStack() as spools:
            found: list[CheckedMedium] = []
            total = 0
            for source in sources:
                one = await self._check(source, tenant, store)
                if one.content is not None and not isinstance(source, UploadedSource):
                    spools.callback(one.content.close)
                total += one.medium.size
                self._check_total(source.where, total)
                found.append(one)
            yield found

    async def _check(self, source: MediaSource, tenant: str | None, store: MediaStore) -> CheckedMedium:
        if isinstance(source, StoredSource):
            return await self._check_stored(source, tenant, store)
        content = await self._spooled(source)
        try:
            medium = self._medium(source, content.digest, content.size, content.head)
        except BaseException:
            if not isinstance(source, UploadedSource):
                content.close()
            raise
        return CheckedMedium(source=source, medium=medium, content=content)

    async def _spooled(self, source: UploadedSource | InlineSource | RemoteSource) -> Spool:
        match source:
            case UploadedSource():
                return await spool.of_file(source.file)
            case InlineSource():
                return await spool.of_bytes(source.data)
            case RemoteSource():
                return await self._remote.load(source)

    async def _check_stored(
        self, source: StoredSource, tenant: str | None, store: MediaStore
    ) -> CheckedMedium:
        """Check a stored file. Its type is detected again: whoever stored it may have declared another."""
        try:
            stored = await store.keep(source.digest, tenant=tenant)
            async with aclosing(store.read(source.digest, tenant=tenant)) as pieces:
                head = await anext(pieces)
        except ClientError as error:
            raise _at(source.where, error) from error
        medium = self._medium(source, stored.digest, stored.size, head[:HEAD_BYTES])
        return CheckedMedium(source=source, medium=medium, content=None)

    def identified(self, source: MediaSource, content: Spool) -> Media:
        """Return the medium of a content, if it may be stored.

        Raises:
            InvalidParamError: it is too large, of an unknown type, or of another type than declared.
        """
        self._check_size(source.where, content.size)
        kind = kind_of(source.where, content.head, declared=source.declared, modality=source.modality)
        return Media(
            modality=source.modality or kind.modalities[0],
            digest=content.digest,
            size=content.size,
            content_type=kind.content_type,
            name=source.name,
        )

    def check_json_lines(self, source: MediaSource, content: Spool) -> None:
        """Check the size of a file of JSON lines, and how it begins.

        Raises:
            InvalidParamError: it is too large, or no such file.
        """
        self._check_size(source.where, content.size)
        check_json_lines(source.where, content.head)

    def _medium(self, source: MediaSource, digest: str, size: int, head: bytes) -> Media:
        """The medium as the model takes it."""
        self._check_size(source.where, size)
        kind = kind_of(source.where, head, declared=source.declared, modality=source.modality)
        modality = self._modality(source, kind)
        return Media(
            modality=modality, digest=digest, size=size, content_type=kind.content_type, name=source.name
        )

    def _check_size(self, where: str, size: int) -> None:
        if size > self.settings.max_bytes:
            raise self.too_large(where, size)

    def too_large(self, where: str, size: int) -> InvalidParamError:
        """Return the error for a file that is too large."""
        return InvalidParamError(
            where,
            f"{where}: expected at most {self.settings.max_bytes} bytes (media.max_bytes), found {size}",
            code="media_too_large",
            status=413,
        )

    def _modality(self, source: MediaSource, kind: ContentKind) -> str:
        """The modality that a medium is used as: the one its part asks for, or the first the model takes."""
        if source.modality:
            if source.modality not in kind.modalities:
                raise mismatch(source.where, f"{source.modality} content", kind)
            return source.modality
        taken = [one for one in kind.modalities if one in self._served.modalities]
        if not taken:
            self.check_modality(kind.modalities[0], source.where, source.name)
        return taken[0]

    def _check_total(self, where: str, total: int) -> None:
        limit = self.settings.max_request_bytes
        if total > limit:
            raise InvalidParamError(
                where,
                f"{where}: expected at most {limit} bytes in all files of a request "
                f"(media.max_request_bytes), found more",
                code="media_too_large",
                status=413,
            )

    async def _store(self, one: CheckedMedium, tenant: str | None, store: MediaStore) -> None:
        if one.content is None:
            return
        try:
            medium = one.medium
            await put(store, one.content, content_type=medium.content_type, name=medium.name, tenant=tenant)
        except ClientError as error:
            raise _at(one.source.where, error) from error


async def put(
    store: MediaStore, content: Spool, *, content_type: str, name: str | None, tenant: str | None
) -> StoredMedium:
    """Store bytes; return what the store says of them."""
    async with aclosing(content.chunks()) as chunks:
        return await store.put(
            chunks, tenant=tenant, content_type=content_type, digest=content.digest, name=name or ""
        )


def _at(where: str, error: ClientError) -> InvalidParamError:
    """The error with the place in the body that it concerns."""
    return InvalidParamError(where, f"{where}: {error.message}", code=error.code, status=error.status)


def with_files(inputs: Inputs, files: list[Media]) -> Inputs:
    """Return the inputs with media, and with their modalities."""
    is_file_alone = inputs.text == "" or inputs.texts == []
    others = [] if is_file_alone else inputs.input_modalities
    modalities = dict.fromkeys([*(file.modality for file in files), *others])
    messages = inputs.messages
    if messages is not None:
        messages = parts.resolved(messages, [file.modality for file in files])
    return msgspec.structs.replace(inputs, files=files, messages=messages, input_modalities=list(modalities))
