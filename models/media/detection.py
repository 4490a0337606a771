"""Detection of media formats from the first bytes of a file. Pure; used before anything decodes.

The declared type of a file is never trusted: a decoder is chosen by these bytes alone.
"""

from dataclasses import dataclass
from typing import Final

HEAD_BYTES: Final = 64
"""The bytes that detection reads."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files.

    Attributes:
        content_type: its MIME type.
        modality: `image`, `video`, `audio` or `tensor`; the usual one for a container of several.
        demuxer: the name of FFmpeg's demuxer that reads it; empty if none of ours does.
        pillow: the name of pillow's plugin that reads it; empty if none does.
    """

    content_type: str
    modality: str
    demuxer: str = ""
    pillow: str = ""


_PNG: Final = Format("image/png", "image", pillow="PNG")
_JPEG: Final = Format("image/jpeg", "image", pillow="JPEG")
_WEBP: Final = Format("image/webp", "image", pillow="WEBP")
_GIF: Final = Format("image/gif", "image", demuxer="gif", pillow="GIF")
_BMP: Final = Format("image/bmp", "image", pillow="BMP")
_TIFF: Final = Format("image/tiff", "image", pillow="TIFF")
_AVIF: Final = Format("image/avif", "image", pillow="AVIF")
_MP4: Final = Format("video/mp4", "video", demuxer="mov")
_MOV: Final = Format("video/quicktime", "video", demuxer="mov")
_M4A: Final = Format("audio/mp4", "audio", demuxer="mov")
_WEBM: Final = Format("video/webm", "video", demuxer="matroska")
_MKV: Final = Format("video/x-matroska", "video", demuxer="matroska")
_WAV: Final = Format("audio/wav", "audio", demuxer="wav")
_FLAC: Final = Format("audio/flac", "audio", demuxer="flac")
_MP3: Final = Format("audio/mpeg", "audio", demuxer="mp3")
_AAC: Final = Format("audio/aac", "audio", demuxer="aac")
_OGG: Final = Format("audio/ogg", "audio", demuxer="ogg")
_NPZ: Final = Format("application/zip", "tensor")
_NPY: Final = Format("application/x-npy", "tensor")
_SAFETENSORS: Final = Format("application/safetensors", "tensor")

_PREFIXES: Final = (
    (b"\x89PNG\r\n\x1a\n", _PNG),
    (b"\xff\xd8\xff", _JPEG),
    (b"GIF87a", _GIF),
    (b"GIF89a", _GIF),
    (b"BM", _BMP),
    (b"II*\x00", _TIFF),
    (b"MM\x00*", _TIFF),
    (b"II+\x00", _TIFF),
    (b"MM\x00+", _TIFF),
    (b"fLaC", _FLAC),
    (b"OggS", _OGG),
    (b"ID3", _MP3),
    (b"PK\x03\x04", _NPZ),
    (b"\x93NUMPY", _NPY),
)
_QUICKTIME_ATOMS: Final = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_AUDIO_BRANDS: Final = frozenset({b"M4A ", b"M4B ", b"M4P "})
FORMATS: Final = tuple(
    dict.fromkeys(
        (
            *(found for _, found in _PREFIXES),
            _WEBP,
            _AVIF,
            _MP4,
            _MOV,
            _M4A,
            _WEBM,
            _MKV,
            _WAV,
            _AAC,
            _SAFETENSORS,
        )
    )
)
"""All formats that are detected."""


def format_of(head: bytes) -> Format | None:
    """The format of a file by its first `HEAD_BYTES` bytes; None if it is none of `FORMATS`."""
    for prefix, found in _PREFIXES:
        if head.startswith(prefix):
            return found
    if head[:4] in {b"RIFF", b"RF64"}:
        return {b"WAVE": _WAV, b"WEBP": _WEBP}.get(head[8:12])
    if head.startswith(b"\x1aE\xdf\xa3"):
        return _WEBM if b"webm" in head[:HEAD_BYTES] else _MKV
    if head[4:8] == b"ftyp":
        return _of_brand(head[8:12], head)
    if head[4:8] in _QUICKTIME_ATOMS:
        return _MOV
    return _of_sync_word(head) or _of_safetensors(head)


def _of_brand(brand: bytes, head: bytes) -> Format:
    """The format of an ISO base media file."""
    if brand in {b"avif", b"avis"} or (brand in {b"mif1", b"msf1"} and b"avif" in head):
        return _AVIF
    if brand == b"qt  ":
        return _MOV
    return _M4A if brand in _AUDIO_BRANDS else _MP4


def _of_sync_word(head: bytes) -> Format | None:
    """MPEG audio without tags: eleven set bits, then the layer; layer 0 is AAC in ADTS."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    if head[1] & 0xF6 == 0xF0:
        return _AAC
    is_valid = head[1] & 0x18 != 0x08 and head[1] & 0x06 and head[2] & 0xF0 != 0xF0 and head[2] & 0x0C != 0x0C
    return _MP3 if is_valid else None


def _of_safetensors(head: bytes) -> Format | None:
    """A length of the header in 8 bytes, and JSON."""
    length = int.from_bytes(head[:8], "little")
    return _SAFETENSORS if head[8:9] == b"{" and 1 < length <= 100_000_000 else None
