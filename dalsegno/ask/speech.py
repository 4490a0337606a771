"""Speech in a compressed format, for `dalsegno ask --out speech.mp3`, by `POST /v1/audio/speech`."""

import json
from pathlib import Path
from typing import Final

from dalsegno.ask.chat import ChatPrompt
from shared.errors import ClientError

FORMATS: Final = frozenset({"aac", "flac", "mp3", "opus"})
"""The formats that the server encodes, by the file's extension. WAV is also written by the client."""
_PIECE: Final = 1 << 16


def save_speech(prompt: ChatPrompt, path: Path, voice: str | None) -> Path:
    """Let a model that speaks read a text out; write the sound as it arrives.

    Raises:
        DalSegnoError: there is no server, it refuses, or the answer breaks off.
    """
    server = prompt.server
    body = {
        "model": prompt.model or server.first_model(),
        "input": prompt.text,
        "voice": voice,
        "response_format": path.suffix.lstrip(".").lower(),
        "max_tokens": prompt.max_tokens,
        "temperature": prompt.temperature,
        "seed": prompt.seed,
    }
    given = json.dumps({name: value for name, value in body.items() if value is not None})
    with server.request("POST", "/v1/audio/speech", given) as response, path.open("wb") as file:
        while piece := response.read1(_PIECE):
            try:
                file.write(piece)
            except OSError as error:
                raise ClientError(f"{path} cannot be written: {error.strerror or error}") from error
    if not path.stat().st_size:
        path.unlink()
        raise ClientError(f"the answer has no sound, so {path} was not written", code="no_sound")
    return path
