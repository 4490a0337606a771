"""Values as output chunks: text as text, all other modalities as bytes with dtype and shape.

A value above `PIECE_BYTES` is cut into pieces (`shared.output_pieces`). An image, a video or a sound that a
node emits as an encoded file is recognised by its first bytes; its chunks say which type of file it is, and
those of a video its codec, size and length.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from shared.output_pieces import PIECE_BYTES, piece_spans
from workers.data_plane.port import Array
from workers.execution.output_tracks import ReleasedValue

_SIGNATURES: Final = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (8, b"WEBP", "image/webp"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
    (8, b"WAVE", "audio/wav"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
)
"""Offset, signature and MIME type of the files that nodes emit."""


def contents(
    tensor: str, modality: str, array: Array, data: bytes, media: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The chunks of one value, as fields of `OutputChunk`.

    Args:
        tensor: the name of the value: its node and edge.
        modality: where it goes.
        array: the value's dtype and shape; `data` are its bytes.
        data: the bytes.
        media: what the model says of the modality (`ModelGraph.media`).
    """
    if modality == "text":
        yield {"text": data.decode()}
        return
    metadata = {
        "dtype": array.dtype,
        "shape": list(array.shape),
        **_about_file(modality, array, data),
        **media,
    }
    if len(data) <= PIECE_BYTES:
        yield {"modality": modality, "data": data, "metadata": metadata}
        return
    for piece, start, stop in piece_spans(tensor, len(data), PIECE_BYTES):
        yield {"modality": modality, "data": data[start:stop], "metadata": {**metadata, **piece.metadata}}


def array_of(released: ReleasedValue) -> Array:
    """The value in released chunks, as the node gave it."""
    first = released[0]
    if first.modality == "text":
        text = np.frombuffer("".join(chunk.text for chunk in released).encode(), np.uint8)
        return Array(dtype="uint8", shape=text.shape, data=text)
    data = np.frombuffer(b"".join(chunk.data or b"" for chunk in released), np.uint8)
    return Array(dtype=first.metadata["dtype"], shape=tuple(first.metadata["shape"]), data=data)


def _about_file(modality: str, array: Array, data: bytes) -> dict[str, Any]:
    """The facts of an encoded file: its MIME type, for a flat array of bytes that begins like one."""
    if array.dtype != "uint8" or len(array.shape) != 1 or modality not in ("image", "video", "audio"):
        return {}
    found = (kind for offset, signature, kind in _SIGNATURES if data.startswith(signature, offset))
    kind = next((kind for kind in found if kind.startswith(modality)), None)
    if kind is None:
        return {}
    return {"content_type": kind, **(_about_video(data) if modality == "video" else {})}


def _about_video(data: bytes) -> dict[str, Any]:
    from models.media.video_facts import video_facts  # noqa: PLC0415 - FFmpeg, for models that make videos

    return video_facts(data)
