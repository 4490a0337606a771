"""The type of a medium by its first bytes, and the modalities that it can be used as. Pure.

`models.media.detection` knows the formats that the decoders read; any other content is refused here, before
anything decodes it. The type that a client declares is only compared with the detected one.
"""

from dataclasses import dataclass
from typing import Final

from gateway.errors import InvalidParamError
from models.media.detection import format_of

HEAD_BYTES: Final = 256
"""The number of leading bytes that `kind_of` reads."""
IMAGE: Final = "image"
VIDEO: Final = "video"
AUDIO: Final = "audio"
MODALITIES: Final = (IMAGE, VIDEO, AUDIO, "tensor")
_BOM: Final = b"\xef\xbb\xbf"
_ANIMATIONS: Final = frozenset({"image/gif", "image/webp", "image/avif"})
_ANY: Final = "an image, audio, a video or tensors"
_EXPECTED: Final = {IMAGE: "an image", VIDEO: "a video", AUDIO: "audio, or a video with audio"}
_NAMES: Final = (
    (b"%pdf", "a PDF document"),
    (b"\x1f\x8b", "gzip data"),
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<svg", "an SVG document"),
    (b"<?xml", "an XML document"),
)


@dataclass(frozen=True, slots=True)
class ContentKind:
    """A type of content.

    Attributes:
        content_type: the MIME type.
        modalities: the modalities that it can be used as, the usual one first.
    """

    content_type: str
    modalities: tuple[str, ...]


def kind_of(where: str, head: bytes, *, declared: str = "", modality: str = "") -> ContentKind:
    """Return the type of the content that begins with `head`.

    Args:
        where: the place of the content in the request, for errors.
        head: the first `HEAD_BYTES` bytes; fewer only of shorter content.
        declared: the MIME type that the client declares; empty if it declares none.
        modality: what the content is to be, for the error of an unknown type; empty: any.

    Raises:
        InvalidParamError: the type is unknown, or of another modality than the declared one.
    """
    found = format_of(head)
    if found is None:
        raise InvalidParamError(
            where,
            f"{where}: expected {_EXPECTED.get(modality, _ANY)}, found {_described(head)}",
            code="unsupported_media",
        )
    kind = ContentKind(found.content_type, _modalities(found.content_type, found.modality))
    said = declared.partition("/")[0]
    if said in (IMAGE, VIDEO, AUDIO, "text") and said not in kind.modalities:
        raise mismatch(where, f"{declared[:80]} as declared", kind)
    return kind


def check_json_lines(where: str, head: bytes) -> None:
    """Check that content may be a file of JSON objects, one in each line; the lines are not read here.

    Raises:
        InvalidParamError: its first line does not begin as an object does.
    """
    if not head.removeprefix(_BOM).lstrip().startswith(b"{"):
        raise InvalidParamError(
            where,
            f"{where}: expected JSON objects, one in each line (JSONL), found {_described(head)}",
            code="unsupported_media",
        )


def mismatch(where: str, expected: str, kind: ContentKind) -> InvalidParamError:
    """Return the error for content of another type than expected."""
    return InvalidParamError(
        where, f"{where}: expected {expected}, found {kind.content_type}", code="media_type_mismatch"
    )


def _modalities(content_type: str, usual: str) -> tuple[str, ...]:
    if usual == VIDEO:
        return (VIDEO, AUDIO)
    return (IMAGE, VIDEO) if content_type in _ANIMATIONS else (usual,)


def _described(head: bytes) -> str:
    """A noun for content that is no medium."""
    start = head.lstrip().lower()
    for prefix, name in _NAMES:
        if start.startswith(prefix):
            return name
    if not head:
        return "no bytes"
    return "text" if head.isascii() and b"\0" not in head else "an unknown format"
