"""Sound, images and videos of a recorded answer, as files that a browser plays. Pure.

Sound is one WAV file per track and choice. Other media are whole files of types that a browser shows, or raw
pixels, which become a PNG file. Everything else is named, and not shown.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dalsegno.bundle.bundle_file import LeftOut
from dalsegno.client.media import Audio
from dalsegno.history.reply import Reply, StoredChunk
from dalsegno.replay.recorded_request import History
from shared.events import MalformedEventError
from shared.output_pieces import PieceAssembler, whole_metadata
from shared.subject_rules import read_event

SHOWN: Final = frozenset(
    {
        "image/png", "image/jpeg", "image/webp", "image/gif", "image/avif",
        "video/mp4", "video/webm", "audio/wav", "audio/flac", "audio/ogg", "audio/mpeg",
    }
)  # fmt: skip
"""Types that a browser shows, and that contain no script."""
_BYTES_PER_SAMPLE: Final = 2


class MadeMedium(msgspec.Struct, frozen=True, kw_only=True):
    """One medium of an answer.

    Attributes:
        times: the log time of each of its chunks, and the number of samples (sound) or bytes before its end.
        data: the file; None if it cannot be shown, for the reason `why_not`.
        seconds: of sound.
    """

    modality: str
    track: str
    choice: int
    content_type: str
    times: list[tuple[int, int]]
    data: bytes | None = None
    why_not: str | None = None
    seconds: float | None = None
    sample_rate: int | None = None

    @property
    def digest(self) -> str:
        """Names the bytes."""
        return hashlib.blake2b(self.data or b"", digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer:
    """The valid answer of a request.

    Attributes:
        times: the log time of each position, in ns.
        left_out: by position, the data that a chunk lacks.
    """

    reply: Reply
    times: dict[int, int]
    left_out: dict[int, LeftOut]


def answer_of(history: History, request_id: str) -> Answer:
    """Return the valid answer of a request."""
    reply, times = Reply(), dict[int, int]()
    for record in history.records:
        address = history.subjects.parse(record.subject)
        if address is None or (address.request_id is not None and address.request_id != request_id):
            continue
        try:
            address, event = read_event(record, history.subjects)
        except MalformedEventError:
            continue
        times[record.seq] = record.time_ns
        reply.take(address, event, record.seq, record.time_ns)
    return Answer(reply, times, history.left_out)


def made(answer: Answer) -> list[MadeMedium]:
    """Return the media of an answer."""
    tracks: dict[tuple[str, str, int], list[StoredChunk]] = {}
    for one in answer.reply.chunks:
        if one.chunk.modality != "text" and not one.chunk.is_echo:
            key = one.chunk.modality, one.chunk.track, one.chunk.choice
            tracks.setdefault(key, []).append(one)
    found: list[MadeMedium] = []
    for (modality, track, choice), chunks in tracks.items():
        if modality == "audio" and "content_type" not in chunks[0].chunk.metadata:
            found.append(_sound(track, choice, chunks, answer))
        else:
            found += _files(modality, track, choice, chunks, answer)
    return found


def plain(number: int, one: MadeMedium, begin_ns: int) -> dict[str, Any]:
    """A medium as JSON values, without its bytes."""
    return {
        "number": number,
        "modality": one.modality,
        "track": one.track,
        "choice": one.choice,
        "content_type": one.content_type,
        "bytes": len(one.data or b""),
        "why_not": one.why_not,
        "seconds": one.seconds,
        "sample_rate": one.sample_rate,
        "times": [[(time_ns - begin_ns) / 1e9, end] for time_ns, end in one.times],
    }


def _sound(
    track: str,
    choice: int,
    chunks: list[StoredChunk],
    answer: Answer,
) -> MadeMedium:
    metadata = chunks[0].chunk.metadata
    rate = _whole(metadata.get("sample_rate"), 24_000)
    channels = _whole(metadata.get("num_channels"), 1)
    ends, total = [], 0
    for one in chunks:
        left = answer.left_out.get(one.seq)
        size = left.bytes if left is not None else len(one.chunk.data or b"")
        total += size // (_BYTES_PER_SAMPLE * channels)
        ends.append((answer.times[one.seq], total))
    is_whole = not any(one.seq in answer.left_out for one in chunks)
    pcm = b"".join(one.chunk.data or b"" for one in chunks)
    return MadeMedium(
        modality="audio",
        track=track,
        choice=choice,
        content_type="audio/wav",
        times=ends,
        data=Audio(pcm, rate, channels).wav() if is_whole else None,
        why_not=None if is_whole else _LEFT_OUT,
        seconds=total / rate,
        sample_rate=rate,
    )


_LEFT_OUT: Final = "the bundle has digests only; `dalsegno export --payloads` writes the bytes too"


def _files(
    modality: str,
    track: str,
    choice: int,
    chunks: list[StoredChunk],
    answer: Answer,
) -> list[MadeMedium]:
    assembler, found = PieceAssembler[StoredChunk](), []
    for one in chunks:
        if (pieces := assembler.push(one.chunk.metadata, one)) is None:
            continue
        metadata = whole_metadata(one.chunk.metadata)
        data = b"".join(piece.chunk.data or b"" for piece in pieces)
        kind, shown, why_not = _shown(metadata, data)
        if any(piece.seq in answer.left_out for piece in pieces):
            shown, why_not = None, _LEFT_OUT
        found.append(
            MadeMedium(
                modality=modality,
                track=track,
                choice=choice,
                content_type=kind,
                times=[(answer.times[piece.seq], len(data)) for piece in pieces[-1:]],
                data=shown,
                why_not=why_not,
            )
        )
    return found


def _shown(metadata: dict[str, Any], data: bytes) -> tuple[str, bytes | None, str | None]:
    """Return a file's type, its bytes if a browser shows it, and else the reason why not."""
    kind = str(metadata.get("content_type", ""))
    if kind in SHOWN:
        return kind, data, None
    match metadata.get("dtype"), metadata.get("shape"):
        case "uint8", [int(height), int(width), 3] if 0 < height * width * 3 == len(data):
            return "image/png", png(data, width, height), None
        case dtype, shape if dtype is not None:
            return "application/octet-stream", None, f"a tensor of {dtype}, shape {shape}"
        case _:
            return "application/octet-stream", None, f"bytes of type {kind or 'unknown'}"


def png(pixels: bytes, width: int, height: int) -> bytes:
    """Return rows of RGB bytes as a PNG file."""
    stride = 3 * width
    rows = b"".join(b"\0" + pixels[at : at + stride] for at in range(0, stride * height, stride))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 < value < 1_000_000 else default
