"""A deployment whose model takes images, video and audio, and small files for it."""

import base64
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from configs.deployment import MediaSettings
from configs.secrets import ApiKey
from shared.events import Media, RequestSubmitted
from tests.gateway.world import SERVED, Performance, World, deployment


class SeenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the model.

    Attributes:
        detail_level: patches per side.
    """

    detail_level: Annotated[int, Meta(ge=1, le=8)] = 2


SEES: Final = type(SERVED)(
    name="demo",
    family="decoder_lm",
    ranks=(0,),
    max_seq_len=512,
    modalities=("text", "image", "video", "audio"),
    outputs=("text",),
    options=SeenOptions,
)


def png(red: int = 255, *, comment: bytes = b"") -> bytes:
    """A PNG of one pixel; `comment` makes it longer."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    text = chunk(b"tEXt", b"c\0" + comment) if comment else b""
    pixels = chunk(b"IDAT", zlib.compress(bytes([0, red, 0, 0])))
    return b"\x89PNG\r\n\x1a\n" + head + text + pixels + chunk(b"IEND", b"")


MP4: Final = b"\0\0\0\x18ftypisom\0\0\x02\0isomiso2" + bytes(64)
WAV: Final = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\xc0\x5d\0\0\x80\xbb\0\0\x02\0\x10\0data\0\0\0\0"
GIF: Final = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"


def data_url(data: bytes, content_type: str = "image/png") -> str:
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chat with these parts, and a question."""
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def sees(performance: Performance) -> None:
    """Answer with the modalities of the files."""
    performance.say(" ".join(file.modality for file in performance.event.inputs.files) or "nothing")
    performance.finish()


@asynccontextmanager
async def seeing(
    media: MediaSettings | None = None, keys: tuple[ApiKey, ...] = (), **how: Any
) -> AsyncIterator[World]:
    async with deployment(sees, served=SEES, media=media, keys=keys, **how) as world:
        yield world


def submitted(world: World) -> RequestSubmitted:
    """The only submission."""
    [event] = world.events("request")
    assert isinstance(event, RequestSubmitted)
    return event


async def stored(world: World, medium: Media, tenant: str | None = None) -> bytes:
    """The bytes of a medium in the store."""
    return b"".join([piece async for piece in world.media.read(medium.digest, tenant=tenant)])


async def stored_media(world: World, tenant: str | None = None) -> list[str]:
    """The digests in the store."""
    return [one.digest async for one in world.media.list(tenant=tenant)]
