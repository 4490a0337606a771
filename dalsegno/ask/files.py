"""Files that accompany a question, for `dalsegno ask --file`: parts of a chat's message.

A small file is part of the request. A large one is stored on the server first, under its digest, so that a
question that is asked again does not send it again.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from models.media.detection import HEAD_BYTES, format_of
from shared.errors import ClientError

INLINE_BYTES: Final = 8 * 1024 * 1024
"""The size up to which a file is part of the request."""
_ARGUMENTS: Final = {"image": "images", "audio": "audio", "video": "video"}


def message_content(text: str, files: Sequence[Path], store: Callable[[Path, str], None]) -> Any:
    """Return the content of the user's message: the text, or the files in order and then the text.

    Args:
        text: the question.
        files: paths.
        store: stores a large file on the server, under a digest.

    Raises:
        ClientError: a file cannot be read.
    """
    if not files:
        return text
    return [*(_part(path, store) for path in files), {"type": "text", "text": text}]


def client_arguments(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files as arguments of `dalsegno.client.Client.stream`, by modality.

    Raises:
        ClientError: a file cannot be read, or is neither an image, audio nor a video.
    """
    found: dict[str, list[Path]] = {}
    for path in files:
        kind = format_of(_read(path, HEAD_BYTES))
        if kind is None or kind.modality not in _ARGUMENTS:
            raise ClientError(f"{path}: expected an image, audio or a video, found something else")
        found.setdefault(_ARGUMENTS[kind.modality], []).append(path)
    return found


def _part(path: Path, store: Callable[[Path, str], None]) -> dict[str, Any]:
    if _size(path) <= INLINE_BYTES:
        data = base64.b64encode(_read(path)).decode()
        return {"type": "file", "file": {"file_data": data, "filename": path.name}}
    digest = _digest(path)
    store(path, digest)
    return {"type": "file", "file": {"file_id": f"file-{digest}", "filename": path.name}}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise _unreadable(path, error) from error


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ClientError:
    return ClientError(f"{path} cannot be read: {error.strerror or error}")
