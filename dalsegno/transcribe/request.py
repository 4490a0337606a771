"""The request of `dalsegno transcribe`: a form with a file, which is sent from the disk in pieces."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dalsegno.ask.server import Server
from shared.errors import ClientError

_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription:
    """What is to be written down, and how; None leaves a parameter to the server.

    Attributes:
        form: a `response_format` of OpenAI's route.
        translate: write English.
        is_stream: a text comes as it is heard.
    """

    file: Path
    form: str
    model: str | None = None
    language: str | None = None
    translate: bool = False
    prompt: str | None = None
    is_stream: bool = True


def pieces(server: Server, asked: Transcription) -> Iterator[str]:
    """Yield the transcript: a text as it is heard, any other format whole.

    Raises:
        DalSegnoError: the file cannot be read, there is no server, it refuses, or the answer breaks off.
    """
    is_stream = asked.is_stream and asked.form == "text" and not asked.translate
    fields = {
        "model": asked.model or server.first_model(),
        "language": asked.language,
        "prompt": asked.prompt,
        **({"stream": "true"} if is_stream else {"response_format": asked.form}),
    }
    route = "/v1/audio/translations" if asked.translate else "/v1/audio/transcriptions"
    boundary = secrets.token_hex(16)
    head, end = _around({name: value for name, value in fields.items() if value}, asked.file, boundary)
    headers = {
        "Content-Type": f"multipart/form-data; boundary={boundary}",
        "Content-Length": str(len(head) + _size(asked.file) + len(end)),
    }
    with server.request("POST", route, _body(head, asked.file, end), headers) as response:
        if not is_stream:
            yield response.read().decode()
            return
        for event in server.events(response):
            if event.get("type") == "transcript.text.delta":
                yield event["delta"]
            elif event.get("type") == "transcript.text.done":
                return


def _around(fields: dict[str, str], file: Path, boundary: str) -> tuple[bytes, bytes]:
    """The bytes of a form before and after the content of its file (RFC 7578)."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    name = file.name.replace("\\", "_").replace('"', "_").replace("\r", "_").replace("\n", "_")
    parts.append(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    return "".join(parts).encode(), f"\r\n--{boundary}--\r\n".encode()


def _body(head: bytes, file: Path, end: bytes) -> Iterator[bytes]:
    yield head
    with file.open("rb") as content:
        while piece := content.read(_PIECE):
            yield piece
    yield end


def _size(file: Path) -> int:
    try:
        file.open("rb").close()
        return file.stat().st_size
    except OSError as error:
        raise ClientError(f"{file} cannot be read: {error.strerror or error}") from error
