"""`/v1/files`: OpenAI's routes for files, and `PUT` with a digest, which can be resumed.

    POST   /v1/files               a form with `file`; answers the file's object
    GET    /v1/files               the files of this API key
    GET    /v1/files/{id}          one file; for an upload that broke off, the bytes that are there
    GET    /v1/files/{id}/content  its bytes
    DELETE /v1/files/{id}
    PUT    /v1/files/{digest}      the bytes, from a position on with `Content-Range`

A file belongs to the API key that stored it: for other keys it does not exist.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.responses import StreamingResponse

from gateway.client_key import key_name
from gateway.errors import InvalidParamError
from gateway.http.bodies import check_known
from gateway.http.content_types import MULTIPART, ContentTypeError, content_type
from gateway.http.forms import open_form
from gateway.http.pages import check_page, page_document
from gateway.media import content_range, file_objects, intake
from gateway.media.content_kinds import HEAD_BYTES, check_json_lines, kind_of
from gateway.media.file_objects import NoFileError, digest_of, file_object
from gateway.media.intake import MediaIntake
from gateway.media.sources import UploadedSource, safe_name
from gateway.media.spool import Spool, of_file
from gateway.requests.service import Gateway
from shared.errors import ClientError
from shared.media.store import MediaGoneError, MediaStore, StoredMedium
from shared.validation_errors import described

FILES: Final = "/v1/files"
_FORM_FIELDS: Final = ("file", "purpose")
_MOST_LISTED: Final = 10_000


def file_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    media = MediaIntake(gateway)
    router = APIRouter(tags=["files"])

    @router.post(FILES, summary="Store a file", openapi_extra=_FORM)
    async def store(request: Request) -> dict[str, Any]:
        if content_type(request) != MULTIPART:
            raise ContentTypeError(f"content-type: expected {MULTIPART}, found another one")
        async with open_form(request, media.form_limits) as form:
            source, purpose = _form_file(form)
            content = await of_file(source.file)
            kind = file_objects.LINES_TYPE
            if purpose == file_objects.BATCH:
                media.check_json_lines(source, content)
            else:
                kind = _identified(media, source, content, purpose)
            stored = await intake.put(
                media.store, content, content_type=kind, name=source.name, tenant=key_name(request.scope)
            )
        return file_object(stored, purpose=purpose, name=source.name)

    @router.get(FILES, summary="The stored files")
    async def files(
        request: Request, limit: int = _MOST_LISTED, after: str = "", order: str = "desc", purpose: str = ""
    ) -> dict[str, Any]:
        def is_asked(one: StoredMedium) -> bool:
            return not purpose or file_objects.purpose_of(one) == purpose

        async with aclosing(media.store.list(tenant=key_name(request.scope))) as stored:
            found = [one async for one in stored if is_asked(one)]
        return _page(found, limit, after, order)

    @router.get(f"{FILES}/{{file_id}}", summary="One stored file")
    async def file(request: Request, file_id: str) -> dict[str, Any]:
        digest = digest_of(file_id)
        state = await media.store.state(digest, tenant=key_name(request.scope))
        if state.medium is not None:
            return file_object(state.medium)
        if not state.received:
            raise NoFileError(file_id)
        return file_objects.upload_object(digest, state)

    @router.get(f"{FILES}/{{file_id}}/content", summary="The bytes of a stored file")
    async def content(request: Request, file_id: str) -> Response:
        digest, tenant = digest_of(file_id), key_name(request.scope)
        state = await media.store.state(digest, tenant=tenant)
        if state.medium is None:
            raise NoFileError(file_id)
        return _download(state.medium, media.store.read(digest, tenant=tenant))

    @router.delete(f"{FILES}/{{file_id}}", summary="Delete a file")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        tenant = key_name(request.scope)
        if not await media.store.delete(digest_of(file_id), tenant=tenant):
            raise NoFileError(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.put(f"{FILES}/{{file_id}}", summary="Store a file under its digest, also from a position on")
    async def put(request: Request, file_id: str) -> dict[str, Any]:
        return file_object(await _resumable(media, request, digest_of(file_id)))

    return router


_FORM: Final = {
    "requestBody": {
        "required": True,
        "content": {
            MULTIPART: {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(file_objects.PURPOSES)},
                    },
                }
            }
        },
    }
}


def _form_file(form: FormData) -> tuple[UploadedSource, str]:
    """The file of a form, and its purpose."""
    for name in form:
        check_known(name, _FORM_FIELDS, what="no field of this route")
    files = form.getlist("file")
    if len(files) != 1 or not isinstance(files[0], UploadFile):
        found = described(files[0]) if len(files) == 1 else f"{len(files)} of them"
        raise InvalidParamError("file", f"file: expected one file, found {found}")
    upload = files[0]
    source = UploadedSource(
        where="file", declared=upload.content_type or "", name=safe_name(upload.filename), file=upload.file
    )
    return source, file_objects.check_purpose(form.get("purpose"))


def _identified(media: MediaIntake, source: UploadedSource, content: Spool, purpose: str) -> str:
    """The type of a medium; the error for a text says how to store the lines of a batch."""
    try:
        return media.identified(source, content).content_type
    except InvalidParamError as error:
        if not content.head.lstrip().startswith(b"{"):
            raise
        raise InvalidParamError(
            "file",
            f"{error.message}; to store the lines of a batch, send purpose=batch, not {purpose}",
            code=error.code,
        ) from error


def _page(found: list[StoredMedium], limit: int, after: str, order: str) -> dict[str, Any]:
    """A page of the list, as OpenAI's clients ask for it."""
    check_page(limit, order, _MOST_LISTED)
    media = sorted(found, key=lambda one: (one.stored_ns, one.digest), reverse=order == "desc")
    if after:
        digests = [one.digest for one in media]
        if (last := digest_of(after)) not in digests:
            raise NoFileError(after)
        media = media[digests.index(last) + 1 :]
    data = [file_object(one) for one in media[:limit]]
    return page_document(data, has_more=len(media) > limit)


def _download(medium: StoredMedium, chunks: AsyncGenerator[bytes, None]) -> Response:
    """The bytes. A browser must not take them for a page of this origin."""
    headers = {
        "content-length": str(medium.size),
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }
    return StreamingResponse(
        chunks, media_type=medium.content_type or "application/octet-stream", headers=headers
    )


async def _resumable(media: MediaIntake, request: Request, digest: str) -> StoredMedium:
    """Store the body under its digest; bytes that arrived before an interruption are kept."""
    where = "file"
    settings, tenant, store = media.settings, key_name(request.scope), media.store
    span = content_range.parse(request.headers.get("content-range"))
    declared = content_type(request)
    if span.total is not None and span.total > settings.max_bytes:
        raise media.too_large(where, span.total)
    async with aclosing(_body(request, where, declared, span.start)) as chunks:
        try:
            stored = await store.put(
                chunks,
                tenant=tenant,
                content_type=declared or "application/octet-stream",
                digest=digest,
                start=span.start,
                max_bytes=settings.max_bytes,
            )
        except ValueError as error:
            raise InvalidParamError(
                "content-range", f"content-range: {error}", code="invalid_range", status=416
            ) from error
        except MediaGoneError as error:
            raise InvalidParamError(
                "content-range",
                f"content-range: the bytes before {span.start} are not there any more; ask "
                "GET /v1/files/{id} for `received_bytes`, and send the rest",
                code="invalid_range",
                status=416,
            ) from error
    if span.start:
        await _check_stored(store, stored, tenant, where, declared)
    _check_total(span, stored)
    return stored


def _check_total(span: content_range.UploadRange, stored: StoredMedium) -> None:
    """Refuse a stated size that is not that of the stored file."""
    if span.total not in (None, stored.size):
        raise InvalidParamError(
            "content-range",
            f"content-range: expected the size of the stored file, {stored.size}, found {span.total}",
            code="invalid_range",
            status=416,
        )


async def _body(request: Request, where: str, declared: str, start: int) -> AsyncGenerator[bytes, None]:
    """The body in chunks. The type of a whole file is checked before its first bytes are stored."""
    head = b""
    is_checked = bool(start)
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            if is_checked:
                yield chunk
                continue
            head += chunk
            if len(head) >= HEAD_BYTES:
                _check_kind(where, head, declared)
                is_checked = True
                yield head
    if not is_checked:
        _check_kind(where, head, declared)
        yield head


def _check_kind(where: str, head: bytes, declared: str) -> None:
    """Refuse content that is neither a medium nor, if it is declared so, a file of JSON lines."""
    if declared == file_objects.LINES_TYPE:
        check_json_lines(where, head)
    else:
        kind_of(where, head, declared=declared)


async def _check_stored(
    store: MediaStore, stored: StoredMedium, tenant: str | None, where: str, declared: str
) -> None:
    """Check the type of a file whose first bytes arrived earlier; one of an unknown type is deleted."""
    async with aclosing(store.read(stored.digest, tenant=tenant)) as pieces:
        head = (await anext(pieces))[:HEAD_BYTES]
    try:
        _check_kind(where, head, declared)
    except ClientError:
        await store.delete(stored.digest, tenant=tenant)
        raise
