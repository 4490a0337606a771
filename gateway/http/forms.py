"""Multipart forms: files are spooled to disk while they arrive, text is bounded.

`gateway.middleware.body_limit` limits a form as a whole. Its files may be much larger than what the gateway
would hold in memory, so the fields with text have a limit of their own.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from gateway.http.content_types import MULTIPART, content_type
from shared.errors import ClientError

_MAX_FIELDS: Final = 64


class MalformedFormError(ClientError):
    """The body is no form, or has more files, fields or text than allowed."""

    code = "invalid_form"


class TooManyFilesError(MalformedFormError):
    """A form has more files than a request may have."""

    code = "too_many_files"
    param = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormLimits:
    """The most files, and the most bytes of all other fields together."""

    files: int
    text_bytes: int


class _FormParser(MultiPartParser):
    """Starlette's parser with a limit for the text of all fields; files go to disk early."""

    spool_max_size = 128 * 1024
    _text_bytes = 0
    text_limit = 0

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.file is None:
            self._text_bytes += end - start
            if self._text_bytes > self.text_limit:
                raise MultiPartException(f"the fields without files have more than {self.text_limit} bytes")
        super().on_part_data(data, start, end)

    @property
    def has_too_many_files(self) -> bool:
        return self._current_files > self.max_files


@asynccontextmanager
async def open_form(request: Request, limits: FormLimits) -> AsyncGenerator[FormData, None]:
    """Parse a form. Its files are open until the end of the block.

    Raises:
        MalformedFormError: the body is no form, or larger than the limits.
    """
    form = (
        await _multipart(request, limits) if content_type(request) == MULTIPART else await _encoded(request)
    )
    try:
        yield form
    finally:
        await form.close()


async def _multipart(request: Request, limits: FormLimits) -> FormData:
    async with aclosing(request.stream()) as stream:
        parser = _FormParser(
            request.headers,
            stream,
            max_files=limits.files,
            max_fields=_MAX_FIELDS,
            max_part_size=limits.text_bytes,
        )
        parser.text_limit = limits.text_bytes
        try:
            return await parser.parse()
        except MultiPartException as error:
            if parser.has_too_many_files:
                raise TooManyFilesError(
                    f"files: expected at most {limits.files} files in a request (media.max_files), found more"
                ) from error
            raise MalformedFormError(f"the body is no valid form: {error.message}") from error


async def _encoded(request: Request) -> FormData:
    """A form without files; `BodyLimit` limits its size."""
    length = max(1, len(await request.body()))
    return await request.form(max_fields=_MAX_FIELDS, max_part_size=length)
