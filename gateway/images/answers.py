"""The answers of the image routes: one JSON document, or server-sent events with unfinished images.

    data: {"type": "image_generation.partial_image", "b64_json": ..., "partial_image_index": 0, ...}
    data: {"type": "image_generation.completed", "b64_json": ..., "usage": {...}, ...}

An edit's events are named `image_edit.*`. A request for several images has one `completed` for each; `index`
is ours: the number of the image. Text that a model writes before it draws is left out.
"""

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from gateway.errors import HttpError
from gateway.generate.values import OutputValue, ValueAssembler
from gateway.http.lines import server_sent_event
from gateway.images.files import form_of, shown, size_of
from gateway.media.file_links import FileLinks
from gateway.requests.response import DocumentFormat
from shared.events import OutputChunk, Usage
from shared.output_pieces import PieceAssembler, whole_metadata

IMAGE: Final = "image"
IMAGE_TOKENS: Final = "image_tokens"
"""The count of a model (`Usage.counts`) of those tokens of its prompt that stand for images."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI's `ImagesUsage`, with the model's `counts` if it has any."""
    of_images = usage.counts.get(IMAGE_TOKENS, 0)
    found: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"text_tokens": usage.prompt_tokens - of_images, "image_tokens": of_images},
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    return {**found, "counts": usage.counts} if usage.counts else found


@dataclass(slots=True)
class ImagesDocument(DocumentFormat):
    """All images in one document, in the order of the choices.

    Attributes:
        created_s: the time of the request, in seconds since 1970.
        choices: the number of images.
        links: stores the images, and gives their addresses; None: the document has the images themselves.
    """

    created_s: int
    choices: int
    links: FileLinks | None = None
    _values: list[ValueAssembler] = field(init=False)
    _images: list[list[OutputValue]] = field(init=False)
    _urls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values = [ValueAssembler("raw") for _ in range(self.choices)]
        self._images = [[] for _ in range(self.choices)]

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality == IMAGE and (value := self._values[choice].push(chunk)) is not None:
            self._images[choice].append(value)
        return b""

    async def prepare(self) -> None:
        if self.links is None:
            return
        for values, image in self._drawn():
            kind = str(image.metadata.get("content_type", ""))
            self._urls.append(await self.links.stored(values.bytes_of(image), kind))

    def complete(self, usage: Usage) -> Iterator[bytes]:
        images = self._drawn()
        yield b'{"created":%d,"data":[' % self.created_s
        for number, (values, image) in enumerate(images):
            yield b"," if number else b""
            if self.links is not None:
                yield msgspec.json.encode({"url": self._urls[number]})
                continue
            yield b'{"b64_json":"'
            yield from values.base64(image)
            yield b'"}'
        about: dict[str, Any] = {"background": "opaque"}
        for values, image in images[:1]:
            about["output_format"] = form_of(str(image.metadata.get("content_type", "")))
            about["size"] = size_of(values.bytes_of(image))
        yield b"]," + msgspec.json.encode({**about, "usage": usage_object(usage)})[1:]

    def close(self) -> None:
        for values in self._values:
            values.close()

    def _drawn(self) -> list[tuple[ValueAssembler, OutputValue]]:
        """All images, each with the assembler that has its bytes."""
        return [
            (values, one) for values, found in zip(self._values, self._images, strict=True) for one in found
        ]


@dataclass(slots=True)
class ImageEvents:
    """Unfinished images as they are shown, and each image when it is drawn.

    Attributes:
        kind: the first part of the events' names.
        created_s: the time of the request, in seconds since 1970.
        choices: the number of images.
    """

    kind: Literal["image_generation", "image_edit"]
    created_s: int
    choices: int = 1
    media_type: str = "text/event-stream; charset=utf-8"
    _pieces: list[PieceAssembler[bytes]] = field(init=False)
    _partials: list[int] = field(init=False)
    _drawn: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pieces = [PieceAssembler() for _ in range(self.choices)]
        self._partials = [0] * self.choices

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality != IMAGE:
            return b""
        pieces = self._pieces[choice].push(chunk.metadata, chunk.data or b"")
        if pieces is None:
            return b""
        image = self._image(choice, b"".join(pieces), whole_metadata(chunk.metadata))
        # The last one waits for the usage, which is known at the end.
        ready, self._drawn = self._drawn, [] if image is None else [image]
        return b"".join(self._completed(one, Usage()) for one in ready)

    def advice(self, choice: int, chunk: OutputChunk) -> bytes:
        image = self._image(choice, chunk.data or b"", chunk.metadata) if chunk.modality == IMAGE else None
        if image is None:
            return b""
        index = self._partials[choice]
        self._partials[choice] += 1
        return server_sent_event(
            {"type": f"{self.kind}.partial_image", **image, "partial_image_index": index}
        )

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        return b"".join(self._completed(one, usage) for one in self._drawn)

    def failed(self, error: HttpError) -> bytes:
        return server_sent_event(error.body)

    def _image(self, choice: int, data: bytes, metadata: dict[str, Any]) -> dict[str, Any] | None:
        found = shown(data, metadata)
        if found is None:
            return None
        file, form, size = found
        return {
            "b64_json": b64encode(file).decode(),
            "created_at": self.created_s,
            "size": size,
            "quality": "auto",
            "background": "opaque",
            "output_format": form,
            **({"index": choice} if self.choices > 1 else {}),
        }

    def _completed(self, image: dict[str, Any], usage: Usage) -> bytes:
        return server_sent_event({"type": f"{self.kind}.completed", **image, "usage": usage_object(usage)})
