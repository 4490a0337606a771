"""Media in requests and answers: conversion of Python values to files, and saving of media from answers.

Input: a path, bytes, `(name, bytes)`, a Pillow image, an `Audio`, or a NumPy array (an image as H x W (x 3 or
4) bytes; sound as `Audio.of`). Pillow and NumPy are imported only if such a value is passed.

The server detects the type of a file from its content. Bytes without a name get one by their signature, for
lists of files and for messages. Sound in answers is 16-bit little-endian PCM, with its `sample_rate` in the
metadata.
"""

import io
import mimetypes
import sys
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from models.media.detection import HEAD_BYTES, format_of
from shared.errors import ClientError
from shared.tensors import ITEM_BYTES

MediaItem: TypeAlias = Any
"""A path, bytes, `(name, bytes)`, a Pillow image, an `Audio` or a NumPy array."""

_SIGNATURES: Final = (
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"GIF8", "gif"),
    (0, b"BM", "bmp"),
    (0, b"II*\x00", "tiff"),
    (0, b"MM\x00*", "tiff"),
    (8, b"WEBP", "webp"),
    (8, b"WAVE", "wav"),
    (8, b"AVI ", "avi"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (4, b"ftypM4A", "m4a"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "webm"),
)
"""Offset, signature, extension of the formats that a server accepts; longer matches first."""
_EXTENSIONS: Final = {
    "image": ("png", "jpg", "jpeg", "webp", "bmp", "tiff", "tif", "gif", "avif"),
    "audio": ("wav", "mp3", "flac", "ogg", "m4a", "aac"),
    "video": ("mp4", "avi", "mov", "mkv", "webm"),
}
_CONTENT_TYPES: Final = {
    ".avif": "image/avif",
    ".webp": "image/webp",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".m4a": "audio/mp4",
    ".aac": "audio/aac",
    ".mkv": "video/x-matroska",
    ".webm": "video/webm",
}
"""MIME types that not every platform's table has."""
_BYTES_PER_SAMPLE: Final = 2


_EXTENSION_OF_TYPE: Final = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/webp": "webp",
    "video/mp4": "mp4",
    "video/webm": "webm",
    "audio/wav": "wav",
    "audio/flac": "flac",
    "audio/ogg": "ogg",
}
_KNOWN_EXTENSIONS: Final = {one for known in _EXTENSIONS.values() for one in known} | {"npz", "safetensors"}


@dataclass(frozen=True, slots=True)
class File:
    """One medium to send."""

    modality: str
    name: str
    data: bytes = field(repr=False)

    @property
    def content_type(self) -> str:
        """The MIME type, as the server detects it; by the name's extension if it is unknown."""
        found = format_of(self.data[:HEAD_BYTES])
        if found is not None:
            return found.content_type
        return mimetypes.guess_type(self.name)[0] or _CONTENT_TYPES[Path(self.name).suffix.lower()]


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of an answer; an image is a whole file."""

    data: bytes = field(repr=False)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_tensor(self) -> bool:
        """True for numbers with a dtype and shape, which `numpy` returns; false for an encoded file."""
        is_known = self.metadata.get("dtype") in ITEM_BYTES and isinstance(self.metadata.get("shape"), list)
        return is_known and "content_type" not in self.metadata

    @property
    def extension(self) -> str:
        """The usual extension of its type of file, without the dot; `bin` for bytes that are no file."""
        kind = str(self.metadata.get("content_type", self.metadata.get("format", "")))
        return _EXTENSION_OF_TYPE.get(kind, kind if kind in _KNOWN_EXTENSIONS else "bin")

    def numpy(self) -> Any:
        """Return a tensor as a NumPy array. bfloat16 comes as float32, 8-bit floats as their bytes.

        Raises:
            ClientError: it is an encoded file, or its metadata lack a dtype and shape.
        """
        import numpy as np

        if not self.is_tensor:
            raise ClientError(
                f"expected a tensor with dtype and shape, found {self.metadata.get('content_type', 'bytes')}"
            )
        dtype, shape = str(self.metadata["dtype"]), self.metadata["shape"]
        if dtype == "bfloat16":
            halves = np.frombuffer(self.data, "<u2").astype(np.uint32) << 16
            return halves.view(np.float32).reshape(shape)
        name = "uint8" if dtype.startswith("float8") else dtype
        return np.frombuffer(self.data, np.dtype(name).newbyteorder("<")).reshape(shape)

    def save(self, path: str | Path) -> Path:
        """Write it to `path`; a tensor to a path that ends in `.npy` as a NumPy file."""
        path = Path(path)
        if path.suffix == ".npy" and self.is_tensor:
            import numpy as np

            np.save(path, self.numpy())
        else:
            path.write_bytes(self.data)
        return path


@dataclass(frozen=True, slots=True)
class Audio:
    """Sound: 16-bit little-endian PCM samples, channels interleaved."""

    pcm: bytes = field(repr=False)
    sample_rate: int
    channels: int = 1

    @classmethod
    def of(cls, samples: Any, sample_rate: int) -> "Audio":
        """Return sound from a NumPy array: (samples,) or (samples, channels), int16, or float in [-1, 1].

        Raises:
            ClientError: the array has another shape or type.
        """
        kind = str(samples.dtype)
        if samples.ndim not in {1, 2} or not (kind == "int16" or kind.startswith("float")):
            raise ClientError(
                f"expected sound as (samples,) or (samples, channels) of int16 or float, "
                f"found {samples.shape} of {kind}"
            )
        if kind != "int16":
            samples = (samples.clip(-1, 1) * 32767).round()
        channels = 1 if samples.ndim == 1 else int(samples.shape[1])
        return cls(samples.astype("<i2").tobytes(), sample_rate, channels)

    @classmethod
    def read(cls, path: str | Path) -> "Audio":
        """Return the sound in a WAV file.

        Raises:
            ClientError: it is not a WAV file of 16-bit PCM.
        """
        try:
            with wave.open(str(path), "rb") as file:
                width, rate, channels = file.getsampwidth(), file.getframerate(), file.getnchannels()
                pcm = file.readframes(file.getnframes())
        except (wave.Error, EOFError) as error:
            raise ClientError(f"{path}: expected a WAV file of 16-bit PCM: {error}") from error
        if width != _BYTES_PER_SAMPLE:
            raise ClientError(f"{path}: expected 16 bits a sample, found {8 * width}")
        return cls(pcm, rate, channels)

    @property
    def seconds(self) -> float:
        return len(self.pcm) / (_BYTES_PER_SAMPLE * self.channels * self.sample_rate)

    def wav(self) -> bytes:
        """Return a WAV file."""
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(self.channels)
            file.setsampwidth(_BYTES_PER_SAMPLE)
            file.setframerate(self.sample_rate)
            file.writeframes(self.pcm)
        return out.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write it to `path` as a WAV file."""
        path = Path(path)
        path.write_bytes(self.wav())
        return path

    def numpy(self) -> Any:
        """Return the samples as an int16 NumPy array: (samples,), or (samples, channels)."""
        import numpy as np

        samples = np.frombuffer(self.pcm, dtype="<i2")
        return samples if self.channels == 1 else samples.reshape(-1, self.channels)


def files_of(modality: str, items: MediaItem) -> list[File]:
    """Return one medium, or a list of media, as files to send.

    Raises:
        ClientError: a value is not a medium of that modality.
    """
    if items is None:
        return []
    several = items if isinstance(items, list) else [items]
    return [_file_of(modality, number, item) for number, item in enumerate(several)]


def _file_of(modality: str, number: int, item: MediaItem) -> File:
    match item:
        case str() | Path():
            path = Path(item)
            return _checked(modality, path.name, _read(path))
        case (str(name), bytes() | bytearray() | memoryview() as data):
            return _checked(modality, name, bytes(data))
        case bytes() | bytearray() | memoryview():
            data = bytes(item)
            return _checked(modality, f"{modality}-{number}.{_extension_of(modality, data)}", data)
        case Audio():
            return _checked(modality, f"{modality}-{number}.wav", item.wav())
        case _:
            return _checked(modality, f"{modality}-{number}.png", _png_of(modality, item))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror or error}") from error


def _checked(modality: str, name: str, data: bytes) -> File:
    extension = Path(name).suffix.lstrip(".").lower()
    known = _EXTENSIONS[modality]
    if extension not in known:
        raise ClientError(
            f"{name!r} lacks an extension of {modality} files: expected one of "
            f"{', '.join(f'.{one}' for one in known)}; pass another name as ('name.{known[0]}', data)"
        )
    return File(modality, name, data)


def _extension_of(modality: str, data: bytes) -> str:
    for offset, signature, extension in _SIGNATURES:
        if data[offset:].startswith(signature) and extension in _EXTENSIONS[modality]:
            return extension
    raise ClientError(
        f"these {len(data)} bytes do not begin like a known {modality} format; name them: "
        f"('name.{_EXTENSIONS[modality][0]}', data)"
    )


def _png_of(modality: str, item: MediaItem) -> bytes:
    """Return a Pillow image, or an array of pixels, as a PNG file."""
    numpy, pillow = sys.modules.get("numpy"), sys.modules.get("PIL.Image")
    if modality == "image" and numpy is not None and isinstance(item, numpy.ndarray):
        from PIL import Image

        item = Image.fromarray(item)
        pillow = sys.modules["PIL.Image"]
    if modality == "image" and pillow is not None and isinstance(item, pillow.Image):
        out = io.BytesIO()
        item.save(out, "PNG")
        return out.getvalue()
    advice = "; sound in an array is Audio.of(samples, sample_rate)" if modality == "audio" else ""
    raise ClientError(
        f"expected an {modality} as a path, bytes, or (name, bytes), found {type(item).__name__}{advice}"
    )
