"""Containers of audio and video, opened with PyAV.

Demuxers and codecs are listed, so that a file cannot choose any of FFmpeg's hundreds. The file is read
through a Python object, and FFmpeg may open no other file or address.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final

import av
from av.container import InputContainer

from models.media.detection import HEAD_BYTES, format_of
from models.media.kinds import MediaError, UnsupportedMediaError

_OPTIONS: Final = {
    "protocol_whitelist": "",
    "format_whitelist": "mov,matroska,webm,gif,wav,flac,mp3,aac,ogg",
}


@contextmanager
def open_container(file: BinaryIO, expected: str) -> Iterator[InputContainer]:
    """Open a file with the demuxer of its format.

    Raises:
        MediaError: the file is damaged, or of another kind than `expected`.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    found = format_of(head)
    if found is None or not found.demuxer:
        kind = found.content_type if found else "an unknown format"
        raise UnsupportedMediaError(f"expected {expected}, found {kind}")
    with av_reported():
        container = av.open(
            file, mode="r", format=found.demuxer, metadata_errors="replace", options=dict(_OPTIONS)
        )
    try:
        yield container
    finally:
        with suppress(Exception):
            container.close()


@contextmanager
def av_reported() -> Iterator[None]:
    """Turn PyAV's exceptions into `MediaError`; a lack of memory is not the file's damage."""
    try:
        yield
    except (MediaError, MemoryError, GeneratorExit):
        raise
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise MemoryError(str(error)) from error
        reason = getattr(error, "strerror", None) or str(error)
        raise MediaError(
            f"expected a complete file, found damage: {type(error).__name__}: {reason}"
        ) from error


def check_codec(stream: Any, allowed: frozenset[str]) -> None:
    """Check that a stream is of an allowed codec.

    Raises:
        UnsupportedMediaError: it is not.
    """
    name = "" if stream.codec_context is None else stream.codec_context.name
    if name not in allowed:
        raise UnsupportedMediaError(
            f"expected one of the codecs {', '.join(sorted(allowed))}; found {name or 'none'!r}"
        )
