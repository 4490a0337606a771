"""The images of `/v1/images/edits`: files of a form, or in JSON addresses and ids of stored files."""

import re
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from gateway.errors import InvalidParamError
from gateway.http.bodies import check_known, read_object
from gateway.http.content_types import FORMS, content_type
from gateway.http.forms import FormLimits, open_form
from gateway.images.request import MAX_IMAGES
from gateway.media import sources
from gateway.media.content_kinds import IMAGE
from gateway.media.sources import MediaSource, UploadedSource
from shared.validation_errors import described

_FILES: Final = ("image", "image[]")
_ENTRY: Final = re.compile(r"(?P<field>\w+)\[(?P<name>\w+)\]", re.ASCII)
_TEXTS: Final = frozenset(
    {"prompt", "model", "size", "quality", "background", "moderation", "output_format", "response_format",
     "input_fidelity", "user", "request_id", "aspect", "negative_prompt"}
)  # fmt: skip
"""Fields of a form that stay text; others, such as numbers, are read as JSON."""


@dataclass(frozen=True, slots=True)
class EditBody:
    """The fields of an edit, and its images."""

    fields: dict[str, Any]
    images: list[MediaSource]


@asynccontextmanager
async def open_edit(request: Request, limits: FormLimits) -> AsyncGenerator[EditBody, None]:
    """Read a body. Its files are open until the end of the block.

    Raises:
        ClientError: it is neither a form nor a JSON object, or an image is missing or malformed.
    """
    if content_type(request) in FORMS:
        async with open_form(request, limits) as form:
            yield _of_form(form)
        return
    fields = await read_object(request)
    yield EditBody(fields, _referred(fields.pop("images", None)))


def _of_form(form: FormData) -> EditBody:
    fields: dict[str, Any] = {}
    images: list[MediaSource] = []
    for name, value in form.multi_items():
        if name in _FILES:
            images.append(uploaded(f"image[{len(images)}]", value))
        else:
            add_field(fields, name, value, texts=_TEXTS)
    return EditBody(fields, _checked("image", images))


def uploaded(where: str, file: object) -> MediaSource:
    """The image of a form's field; `where` names the field.

    Raises:
        InvalidParamError: the field is no file.
    """
    if not isinstance(file, UploadFile):
        raise InvalidParamError(where, f"{where}: expected a file, found text")
    return UploadedSource(
        where=where,
        modality=IMAGE,
        declared=_declared(file.content_type),
        name=sources.safe_name(file.filename),
        file=file.file,
    )


def _declared(kind: str | None) -> str:
    """The declared MIME type, unless it says nothing: OpenAI's client sends one for bytes without a name."""
    return "" if kind in (None, "application/octet-stream") else kind or ""


def add_field(fields: dict[str, Any], name: str, value: UploadFile | str, *, texts: Collection[str]) -> None:
    """Add a form's field to `fields`; those in `texts` stay text, others, such as numbers, are read as JSON.

    OpenAI's clients write the entries of an object one by one: `options[seed]` is the entry `seed`.

    Raises:
        InvalidParamError: it was there already.
    """
    if isinstance(value, UploadFile):
        fields[name] = value.filename or "a file"  # refused by name: no other field takes a file
    elif value and (entry := _ENTRY.fullmatch(name)) is not None:
        found = fields.setdefault(entry["field"], {})
        if not isinstance(found, dict):
            raise InvalidParamError(name, f"{name}: expected an object or its entries, found both")
        add_field(found, entry["name"], value, texts=texts)
    elif name in fields:
        raise InvalidParamError(name, f"{name}: expected it once, found it more than once")
    elif value:
        fields[name] = value if name in texts else value_of(value)


def value_of(text: str) -> Any:
    """The value of a form's field: that of its JSON, or else the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _referred(found: object) -> list[MediaSource]:
    """The images of a JSON body: `[{"image_url": ...}, {"file_id": ...}]`."""
    if found is not None and not isinstance(found, list):
        raise InvalidParamError("images", f"images: expected an array, found {described(found)}")
    return _checked("images", [reference(f"images[{n}]", one) for n, one in enumerate(found or [])])


def reference(where: str, found: object) -> MediaSource:
    """The image that an object with an `image_url` or a `file_id` refers to; `where` is its place.

    Raises:
        InvalidParamError: it is no such object.
    """
    if not isinstance(found, Mapping):
        raise InvalidParamError(where, f"{where}: expected an object, found {described(found)}")
    for name in found:
        check_known(name, ("image_url", "file_id"), f"{where}.", what="unknown field")
    given = [name for name in ("image_url", "file_id") if found.get(name) is not None]
    if len(given) != 1:
        raise InvalidParamError(
            where,
            f"{where}: expected one of image_url and file_id, found {' and '.join(given) or 'neither'}",
        )
    return sources.of_text(f"{where}.{given[0]}", found[given[0]], IMAGE)


def _checked(name: str, images: list[MediaSource]) -> list[MediaSource]:
    if not images:
        raise InvalidParamError(
            name, f"{name}: expected an image, found none", code="missing_required_parameter"
        )
    if len(images) > MAX_IMAGES:
        raise InvalidParamError(
            name, f"{name}: expected at most {MAX_IMAGES} images, found {len(images)}", code="too_many_files"
        )
    return images
