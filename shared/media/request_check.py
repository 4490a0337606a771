"""The check of the media that a request names, before it is admitted. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from shared.errors import ClientError
from shared.events import Inputs, Media

MODALITIES: Final = ("image", "audio", "video", "tensor")


def check_media(inputs: Inputs, modalities: Sequence[str]) -> None:
    """Check the files of a request, and the places that its messages give them.

    Args:
        inputs: the request's inputs.
        modalities: what the model takes.

    Raises:
        ClientError: a file is not named by its digest, the model does not take it, or a message places a file
            that there is not.
    """
    for index, medium in enumerate(inputs.files):
        _check_medium(file_name(index, medium), medium, modalities)
    for place, part in _parts(inputs.messages or []):
        if "file" in part:
            _check_part(place, part, inputs.files)


def file_name(index: int, medium: Media) -> str:
    """Return the name of a request's file in messages for people."""
    return f"files[{index}]" + (f" ({medium.name[:80]!r})" if medium.name else "")


def _check_medium(name: str, medium: Media, modalities: Sequence[str]) -> None:
    if medium.data is not None or medium.ref is not None or not medium.digest:
        found = "bytes" if medium.data is not None else "a reference" if medium.ref is not None else "none"
        raise ClientError(
            f"{name}: expected the digest of a stored medium, found {found}: store the medium before the "
            "request, and name it by its digest, as docs/media.md says",
            code="inline_media",
        )
    if medium.size < 1:
        raise ClientError(f"{name}: expected the size of the medium in bytes, found {medium.size}")
    if medium.modality not in MODALITIES:
        raise ClientError(
            f"{name}: expected a modality of {', '.join(MODALITIES)}, found {medium.modality[:80]!r}"
        )
    if medium.modality not in modalities:
        raise ClientError(
            f"{name}: this model takes {', '.join(modalities)}, found {medium.modality}",
            code="unsupported_modality",
        )


def _parts(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The content parts of messages, each with its place in words."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict):
                yield f"messages[{number}].content[{index}]", part


def _check_part(place: str, part: dict[str, Any], files: Sequence[Media]) -> None:
    index = part["file"]
    if type(index) is not int or not 0 <= index < len(files):
        raise ClientError(
            f"{place}.file: expected the index of one of the request's {len(files)} files, "
            f"found {index!r:.80}"
        )
    if part.get("type") != files[index].modality:
        raise ClientError(
            f"{place}.type: expected {files[index].modality!r}, the modality of "
            f"{file_name(index, files[index])}, found {part.get('type')!r:.80}"
        )
