"""The sources of a request's media, as its body names them. Nothing is loaded or stored yet.

A source is an uploaded file, bytes in base64, an `http(s)` address, or the id of a stored file. `where` is
its place in the body, such as `messages[0].content[1].image_url`, which every error names.
"""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import IO, Final, TypeAlias
from urllib.parse import unquote_to_bytes

from gateway.errors import InvalidParamError
from shared.media.addresses import is_digest
from shared.validation_errors import described

FILE_PREFIX: Final = "file-"
_MAX_NAME: Final = 255
_DATA_URL: Final = re.compile(r"data:([^,]{0,256}),", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The common part.

    Attributes:
        where: the place in the body.
        modality: the modality that the body asks for; empty: that of the content.
        declared: the MIME type that the client declares; empty if it declares none.
        name: the file's name; None if it has none.
    """

    where: str
    modality: str = ""
    declared: str = ""
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedSource(_Source):
    """A file of a form. The form closes it."""

    file: IO[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineSource(_Source):
    """Bytes that are part of the body."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource(_Source):
    """An `http(s)` address."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSource(_Source):
    """A medium of the store."""

    digest: str


MediaSource: TypeAlias = UploadedSource | InlineSource | RemoteSource | StoredSource


def of_text(where: str, text: object, modality: str = "", name: str | None = None) -> MediaSource:
    """Return the source that a string names: a data URL, an `http(s)` address, or the id of a file.

    Raises:
        InvalidParamError: the string is none of these.
    """
    if not isinstance(text, str) or not text:
        raise InvalidParamError(where, f"{where}: expected an address or a data URL, found {described(text)}")
    name = safe_name(name)
    scheme = text[:8].lower()
    if scheme.startswith("data:"):
        return _of_data_url(where, text, modality, name)
    if scheme.startswith(("http://", "https://")):
        return RemoteSource(where=where, modality=modality, name=name, url=text)
    if text.startswith(FILE_PREFIX):
        return StoredSource(where=where, modality=modality, name=name, digest=digest_of_id(where, text))
    raise InvalidParamError(
        where,
        f"{where}: expected a data URL, an http(s) address or the id of a file, found {described(text[:80])}",
    )


def of_base64(
    where: str, text: object, *, modality: str = "", declared: str = "", name: str | None = None
) -> InlineSource:
    """Return the source of bytes in base64.

    Raises:
        InvalidParamError: the text is no base64.
    """
    if not isinstance(text, str):
        raise InvalidParamError(where, f"{where}: expected a string in base64, found {described(text)}")
    data = _decoded(where, text)
    return InlineSource(where=where, modality=modality, declared=declared, name=safe_name(name), data=data)


def digest_of_id(where: str, file_id: str) -> str:
    """Return the digest in the id of a file.

    Raises:
        InvalidParamError: no file has such an id.
    """
    digest = file_id.removeprefix(FILE_PREFIX)
    if not is_digest(digest):
        raise InvalidParamError(
            where,
            f"{where}: there is no file {file_id[:80]!r}; ids of files begin with 'file-', and come from "
            "POST /v1/files",
            code="media_gone",
            status=410,
        )
    return digest


def safe_name(name: object) -> str | None:
    """Return the last part of a file's name, in valid Unicode and bounded; None if nothing is left."""
    if not isinstance(name, str):
        return None
    last = re.split(r"[/\\]", name)[-1]
    text = "".join(char for char in last if char.isprintable()).encode("utf-8", "ignore").decode()
    return text[:_MAX_NAME] or None


def _of_data_url(where: str, text: str, modality: str, name: str | None) -> InlineSource:
    head = _DATA_URL.match(text)
    if head is None:
        raise InvalidParamError(
            where,
            f"{where}: expected a data URL such as data:image/png;base64,..., found one without a comma",
        )
    declared, *parameters = (one.strip().lower() for one in head[1].split(";"))
    content = text[head.end() :]
    data = _decoded(where, content) if "base64" in parameters else unquote_to_bytes(content)
    return InlineSource(where=where, modality=modality, declared=declared, name=name, data=data)


def _decoded(where: str, text: str) -> bytes:
    """The bytes of base64, also in its URL-safe alphabet and without padding."""
    try:
        plain = "".join(text.split()) if any(char in text for char in " \r\n\t") else text
        if "-" in plain or "_" in plain:
            plain = plain.replace("-", "+").replace("_", "/")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParamError(
            where, f"{where}: expected base64, found something else: {error}", code="invalid_base64"
        ) from error
