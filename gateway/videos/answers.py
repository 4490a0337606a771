"""The answer of `/v1/videos/generations`: one document with all videos, in M*'s layout or mini-sglang's.

    {"created": ..., "data": [{"b64_json": ..., "url": null}]}     M*; with response_format url, the other one
    {"created": ..., "data": [{"b64_mp4": ..., "fps": 8}]}         mini-sglang
    {"created": ..., "data": [{"frames_b64_png": [...], "fps": 8}]}

Each video also has its `content_type`, `size`, `frames` and `seconds`, as far as the model states them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.generate.values import OutputValue, ValueAssembler
from gateway.media.file_links import FileLinks
from gateway.requests.response import DocumentFormat
from gateway.requests.usage import usage_object
from shared.events import OutputChunk, Usage


@dataclass(slots=True)
class VideosDocument(DocumentFormat):
    """All videos, in the order of the choices.

    Attributes:
        created_s: the time of the request, in seconds since 1970.
        choices: the number of videos.
        response_format: that of the request.
        links: stores the videos and gives their addresses, for the format `url`.
        fps: the frame rate that was asked for, for frames, which state none; None: none was.
    """

    created_s: int
    choices: int
    response_format: str
    links: FileLinks
    fps: float | None = None
    _values: list[ValueAssembler] = field(init=False)
    _found: list[list[OutputValue]] = field(init=False)
    _urls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values = [ValueAssembler("raw") for _ in range(self.choices)]
        self._found = [[] for _ in range(self.choices)]

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        wanted = "image" if self.response_format == "frames_b64_png" else "video"
        if chunk.modality == wanted and (value := self._values[choice].push(chunk)) is not None:
            self._found[choice].append(value)
        return b""

    async def prepare(self) -> None:
        if self.response_format != "url":
            return
        for values, found in zip(self._values, self._found, strict=True):
            for one in found:
                kind = str(one.metadata.get("content_type", "video/mp4"))
                self._urls.append(await self.links.stored(values.bytes_of(one), kind))

    def complete(self, usage: Usage) -> Iterator[bytes]:
        urls = iter(self._urls)
        yield b'{"created":%d,"data":[' % self.created_s
        is_first = True
        for values, found in zip(self._values, self._found, strict=True):
            groups = [found] if self.response_format == "frames_b64_png" else [[one] for one in found]
            for group in filter(None, groups):
                yield b"" if is_first else b","
                is_first = False
                yield from self._entry(values, group, urls)
        yield b'],"usage":' + msgspec.json.encode(usage_object(usage)) + b"}"

    def close(self) -> None:
        for values in self._values:
            values.close()

    def _entry(
        self, values: ValueAssembler, group: list[OutputValue], urls: Iterator[str]
    ) -> Iterator[bytes]:
        """One video, or its frames."""
        about = _about({"fps": self.fps, **group[0].metadata})
        match self.response_format:
            case "url":
                yield msgspec.json.encode({"b64_json": None, "url": next(urls), **about})
                return
            case "frames_b64_png":
                yield b'{"frames_b64_png":['
                for number, one in enumerate(group):
                    yield b',"' if number else b'"'
                    yield from values.base64(one)
                    yield b'"'
                yield b"],"
            case "b64_mp4":
                yield from _quoted(b"b64_mp4", values, group[0])
            case _:
                yield from _quoted(b"b64_json", values, group[0])
                yield b'"url":null,'
        yield msgspec.json.encode(about)[1:]


def _quoted(name: bytes, values: ValueAssembler, video: OutputValue) -> Iterator[bytes]:
    yield b'{"' + name + b'":"'
    yield from values.base64(video)
    yield b'",'


def _about(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about a video that its metadata have; `fps` is always there."""
    known = {name: metadata[name] for name in ("frames", "content_type") if name in metadata}
    found: dict[str, Any] = {"fps": metadata.get("fps"), **known}
    if "width" in metadata and "height" in metadata:
        found["size"] = f"{metadata['width']}x{metadata['height']}"
    if "frames" in metadata and metadata.get("fps"):
        found["seconds"] = round(metadata["frames"] / metadata["fps"], 6)
    return found
