"""The bodies of video requests, with their media.

A job's is a form whose `input_reference` is a file, or JSON with a reference to one. `/v1/videos/generations`
has an address, a data URL or the id of a stored file.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from gateway.errors import InvalidParamError
from gateway.http.bodies import read_object
from gateway.http.content_types import FORMS, content_type
from gateway.http.forms import FormLimits, open_form
from gateway.images.uploads import add_field, reference, uploaded, value_of
from gateway.media import sources
from gateway.media.content_kinds import IMAGE, VIDEO
from gateway.media.sources import MediaSource
from gateway.videos.request import GenerationRequest

REFERENCE: Final = "input_reference"
_TEXTS: Final = frozenset({"prompt", "model", "size", "user", "request_id", "negative_prompt"})
"""Fields of a form that stay text; others, such as numbers, are read as JSON."""


@dataclass(frozen=True, slots=True)
class VideoBody:
    """The fields of a body, and its media: none, or the image to begin with."""

    fields: dict[str, Any]
    media: list[MediaSource]


@asynccontextmanager
async def open_video(request: Request, limits: FormLimits) -> AsyncGenerator[VideoBody, None]:
    """Read a body. Its file is open until the end of the block.

    Raises:
        ClientError: it is neither a form nor a JSON object, or the reference is malformed.
    """
    if content_type(request) in FORMS:
        async with open_form(request, limits) as form:
            yield _of_form(form)
        return
    fields = await read_object(request)
    yield VideoBody(fields, _referred(fields.pop(REFERENCE, None)))


def _of_form(form: FormData) -> VideoBody:
    fields: dict[str, Any] = {}
    media: list[MediaSource] = []
    for name, value in form.multi_items():
        if name == REFERENCE and media:
            raise InvalidParamError(name, f"{name}: expected it once, found it more than once")
        if name != REFERENCE:
            add_field(fields, name, value, texts=_TEXTS)
        elif isinstance(value, UploadFile):
            media.append(uploaded(REFERENCE, value))
        else:
            media += _referred(value_of(value))
    return VideoBody(fields, media)


def _referred(found: object) -> list[MediaSource]:
    """The image of a reference: an object with an `image_url` or a `file_id`, or an address alone."""
    if found is None:
        return []
    if isinstance(found, str):
        return [sources.of_text(REFERENCE, found, IMAGE)]
    return [reference(REFERENCE, found)]


def generation_media(body: GenerationRequest) -> list[MediaSource]:
    """The image or the video that a video begins with, if any.

    Raises:
        InvalidParamError: there is more than one, or an address is malformed.
    """
    fields = {"image": IMAGE, "image_url": IMAGE, "video": VIDEO}
    given = [name for name in fields if getattr(body, name) is not None]
    if len(given) > 1:
        raise InvalidParamError(
            given[1], f"{given[1]}: expected it alone, found {' and '.join(given)} in one request"
        )
    return [sources.of_text(name, getattr(body, name), fields[name]) for name in given]
