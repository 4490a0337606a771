"""The forms of `/v1/audio/transcriptions` and `/translations`: their fields, and the file with the speech."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from gateway.errors import InvalidParamError
from gateway.http.content_types import FORMS, content_type
from gateway.http.forms import FormLimits, MalformedFormError, open_form
from gateway.images.uploads import add_field
from gateway.media import sources
from gateway.media.content_kinds import AUDIO
from gateway.media.sources import MediaSource, UploadedSource

FILE: Final = "file"
_TEXTS: Final = frozenset({"model", "language", "prompt", "response_format", "user", "request_id"})
"""Fields that stay text; others, such as numbers, are read as JSON."""
_LISTS: Final = frozenset(
    {"timestamp_granularities", "include", "known_speaker_names", "known_speaker_references"}
)
"""Fields with several values: `name[]`, as OpenAI's clients send them, or `name`, once for each."""


@dataclass(frozen=True, slots=True)
class SpeechBody:
    """The fields of a form, and its file."""

    fields: dict[str, Any]
    media: list[MediaSource]


@asynccontextmanager
async def open_speech(request: Request, limits: FormLimits) -> AsyncGenerator[SpeechBody, None]:
    """Read a form. Its file is open until the end of the block.

    Raises:
        ClientError: it is no form, or its file is missing.
    """
    if content_type(request) not in FORMS:
        raise MalformedFormError(
            "expected a form with the field `file` (multipart/form-data), found "
            f"{content_type(request) or 'no content type'}"
        )
    async with open_form(request, limits) as form:
        yield _of_form(form)


def _of_form(form: FormData) -> SpeechBody:
    fields: dict[str, Any] = {}
    media: list[MediaSource] = []
    for key, value in form.multi_items():
        name = key.removesuffix("[]")
        if name == FILE:
            media.append(_uploaded(value))
        elif name in _LISTS and isinstance(value, str):
            fields.setdefault(name, []).append(value)
        else:
            add_field(fields, name, value, texts=_TEXTS)
    if len(media) != 1:
        raise InvalidParamError(
            FILE,
            f"{FILE}: expected one audio file, found {len(media) or 'none'}",
            code="too_many_files" if media else "missing_required_parameter",
        )
    return SpeechBody(fields, media)


def _uploaded(file: object) -> MediaSource:
    if not isinstance(file, UploadFile):
        raise InvalidParamError(FILE, f"{FILE}: expected a file, found text")
    # The declared type is left out: browsers and clients call the same container audio or video.
    return UploadedSource(where=FILE, modality=AUDIO, name=sources.safe_name(file.filename), file=file.file)
