"""Whether a file with sound was cut off: what its header states, against what was decoded.

FFmpeg takes a file that ends early for a shorter one, so a part of a recording would pass for the whole.
Only statements that are exact are compared: an MP3 without a Xing header, an AAC stream or an OGG file has
none.
"""

from typing import Any, BinaryIO, Final

from models.media.kinds import MediaError

_STATED: Final = frozenset({"flac", "mov", "mp4", "m4a"})
"""Containers whose header states the length of each stream."""
_ALONE: Final = frozenset({"matroska", "webm"})
"""Containers whose header states the length of the longest stream."""
_XING: Final = (b"Xing", b"Info", b"VBRI")
_HEAD_BYTES: Final = 1 << 16
_SHORTER: Final = 0.02
_SHORTER_S: Final = 0.1
"""A file may be shorter than stated by so much: by this share, and so many seconds."""
_UNKNOWN_SIZES: Final = frozenset({0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000})
"""Sizes in WAV headers of programs that did not know the size when they wrote it."""


def check_complete(file: BinaryIO, container: Any, stream: Any, *, stated_s: float, seconds: float) -> None:
    """Check that a file is as long as its header says.

    Args:
        file: the file; its position is changed.
        container: of PyAV, decoded to its end.
        stream: the stream that was decoded.
        stated_s: the length that FFmpeg reports.
        seconds: the length that was decoded.

    Raises:
        MediaError: it was cut off.
    """
    names = set(container.format.name.split(","))
    if "wav" in names:
        stated_s = seconds / max(_share_of_wav(file), 1e-9)
    elif not (
        names & _STATED
        or (names & _ALONE and len(container.streams) == 1)
        or ("mp3" in names and any(mark in _head(file) for mark in _XING))
    ):
        return
    if seconds < stated_s * (1 - _SHORTER) - _SHORTER_S:
        raise MediaError(
            f"expected a complete file of {stated_s:.1f} s, as its header says; found {seconds:.1f} s: it "
            "was cut off"
        )


def _head(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(_HEAD_BYTES)


def _share_of_wav(file: BinaryIO) -> float:
    """The share of a WAV file's samples that is there; 1 if its header does not say."""
    total = file.seek(0, 2)
    place = 12  # behind RIFF, a size and WAVE
    while place + 8 <= total:
        file.seek(place)
        head = file.read(8)
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"data":
            return 1.0 if size in _UNKNOWN_SIZES else min((total - place - 8) / size, 1.0)
        place += 8 + size + size % 2
    return 1.0
