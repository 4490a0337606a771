"""Media in the messages of a chat: OpenAI's parts become places of the request's files.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}  ->  {"type": "image", "file": 0}

`file` is an index into `Inputs.files`. Parts of that form are accepted from clients too, for the files that
the same request uploads.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_known
from gateway.media import sources
from gateway.media.content_kinds import AUDIO, IMAGE, MODALITIES, VIDEO
from gateway.media.sources import MediaSource
from shared.validation_errors import described

_ROLES: Final = ("user", "tool")
_URL_PARTS: Final = {"image_url": IMAGE, "video_url": VIDEO, "audio_url": AUDIO}
_DETAILS: Final = (None, "auto", "high")
_AUDIO_TYPES: Final = {"mp3": "audio/mpeg", "m4a": "audio/mp4"}
"""MIME types of `input_audio.format`; other formats are `audio/` and their name."""
UNKNOWN: Final = "file"
"""The type of a rewritten part whose modality follows from the content of its file: see `resolved`."""
PART_TYPES: Final = (*_URL_PARTS, "input_audio", "file", *MODALITIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMedia:
    """A chat whose media are named by index.

    Attributes:
        messages: the messages, with parts such as `{"type": "image", "file": 0}`.
        sources: the media that the parts brought along, in order; their indices follow those of the uploads.
        placed: the modalities as which the messages place uploads, by index.
    """

    messages: Any
    sources: list[MediaSource] = field(default_factory=list)
    placed: dict[int, str] = field(default_factory=dict)


def place(messages: Any, *, uploads: int = 0, check_modality: Callable[[str, str], None]) -> PlacedMedia:
    """Return the messages with their media taken out. Other mistakes in messages are left to their parser.

    Args:
        messages: the value of `messages`, as the client wrote it.
        uploads: the number of files that the request uploads beside its messages.
        check_modality: called with a modality and its place; it refuses what the model does not take.

    Raises:
        InvalidParamError: a part with a medium is malformed.
    """
    found = PlacedMedia(messages=messages)
    if not isinstance(messages, list):
        return found
    changed = [
        _message(f"messages[{number}]", message, found, uploads, check_modality)
        for number, message in enumerate(messages)
    ]
    return PlacedMedia(messages=changed, sources=found.sources, placed=found.placed)


def _message(
    where: str, message: Any, found: PlacedMedia, uploads: int, check_modality: Callable[[str, str], None]
) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    changed = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PART_TYPES:
            changed.append(part)
            continue
        if message.get("role") not in _ROLES:
            raise InvalidParamError(
                place,
                f"{place}: expected media in messages of the role {' or '.join(_ROLES)}, "
                f"found {described(message.get('role'))}",
            )
        changed.append(_part(place, kind, part, found, uploads, check_modality))
    return {**message, "content": changed}


def _part(
    where: str,
    kind: str,
    part: Mapping[str, Any],
    found: PlacedMedia,
    uploads: int,
    check_modality: Callable[[str, str], None],
) -> dict[str, Any]:
    if kind in MODALITIES:
        check_modality(kind, where)
        index = _index(where, part, uploads)
        if found.placed.setdefault(index, kind) != kind:
            raise InvalidParamError(
                f"{where}.file",
                f"{where}.file: expected file {index} as {found.placed[index]} as before, found {kind}",
            )
        return {"type": kind, "file": index}
    modality = AUDIO if kind == "input_audio" else _URL_PARTS.get(kind, "")
    place = f"{where}.{kind}"
    check_modality(modality, place)
    _check_names(where, part, ("type", kind, "cache_control"))
    value = part.get(kind)
    if not isinstance(value, dict):
        raise InvalidParamError(place, f"{place}: expected an object, found {described(value)}")
    found.sources.append(_READERS[kind](place, value))
    return {"type": modality or UNKNOWN, "file": uploads + len(found.sources) - 1}


def _index(where: str, part: Mapping[str, Any], uploads: int) -> int:
    _check_names(where, part, ("type", "file"))
    index = part.get("file")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < uploads:
        raise InvalidParamError(
            f"{where}.file",
            f"{where}.file: expected the index of one of the {uploads} uploaded files, "
            f"found {described(index)}",
        )
    return index


def _of_url(where: str, value: Mapping[str, Any]) -> MediaSource:
    _check_names(where, value, ("url", "detail"))
    if value.get("detail") not in _DETAILS:
        raise NotSupportedError(f"{where}.detail", value["detail"], '"auto"')
    kind = where.rpartition(".")[2]
    return sources.of_text(where, value.get("url"), _URL_PARTS[kind])


def _of_audio(where: str, value: Mapping[str, Any]) -> MediaSource:
    _check_names(where, value, ("data", "format"))
    name = value.get("format")
    if name is not None and not isinstance(name, str):
        raise InvalidParamError(
            f"{where}.format", f"{where}.format: expected a string, found {described(name)}"
        )
    declared = _AUDIO_TYPES.get(name, f"audio/{name}") if name else ""
    return sources.of_base64(where, value.get("data"), modality=AUDIO, declared=declared)


def _of_file(where: str, value: Mapping[str, Any]) -> MediaSource:
    _check_names(where, value, ("file_id", "file_data", "filename"))
    given = [name for name in ("file_id", "file_data") if value.get(name) is not None]
    if len(given) != 1:
        raise InvalidParamError(
            where, f"{where}: expected one of file_id and file_data, found {' and '.join(given) or 'neither'}"
        )
    text, name = value[given[0]], value.get("filename")
    if given == ["file_data"] and not (isinstance(text, str) and text.startswith("data:")):
        return sources.of_base64(where, text, name=name)
    if given == ["file_id"] and not (isinstance(text, str) and text.startswith(sources.FILE_PREFIX)):
        raise InvalidParamError(
            where,
            f"{where}: expected the id of a file, found {described(text)}",
            code="media_gone",
            status=410,
        )
    return sources.of_text(where, text, name=name)


_READERS: Final[Mapping[str, Callable[[str, Mapping[str, Any]], MediaSource]]] = {
    **dict.fromkeys(_URL_PARTS, _of_url),
    "input_audio": _of_audio,
    "file": _of_file,
}


def _check_names(where: str, found: Mapping[str, Any], known: Collection[str]) -> None:
    for name, value in found.items():
        if value is not None:
            check_known(name, known, f"{where}.", what="unknown field")


def is_placed(part: Mapping[str, Any]) -> bool:
    """Return whether a part is one that `place` wrote."""
    return part.get("type") in (*MODALITIES, UNKNOWN) and isinstance(part.get("file"), int)


def resolved(messages: list[dict[str, Any]], modalities: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages with the modality of each part; `modalities` are those of the files, by index."""

    def changed(part: Any) -> Any:
        if isinstance(part, dict) and is_placed(part):
            return {"type": modalities[part["file"]], "file": part["file"]}
        return part

    return [
        {**message, "content": [changed(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
