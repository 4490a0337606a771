"""A streaming chat request over HTTP, for `dalsegno ask`: one question, its answer piece by piece.

An answer may be slow to start (a queue, a long prompt): the server's own limits end it, and after a few
seconds a notice names the health route.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any, Final

from dalsegno.ask.files import message_content
from dalsegno.ask.server import Server

_SILENT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A question and its parameters; None leaves a parameter to the server.

    Attributes:
        api_key: the bearer token, for servers that require one.
        files: images, audio and video that come before the text.
    """

    text: str
    url: str
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    api_key: str | None = None
    files: tuple[Path, ...] = ()

    @property
    def server(self) -> Server:
        """The server that is asked."""
        return Server(url=self.url, api_key=self.api_key)


def stream_answer(
    prompt: ChatPrompt, notice: Callable[[str], None], silent_s: float = _SILENT_S
) -> Iterator[str]:
    """Yield the pieces of the answer as they arrive.

    Args:
        prompt: the question.
        notice: called once with a text for the user if the first piece takes longer than `silent_s`.
        silent_s: seconds until then.

    Raises:
        DalSegnoError: there is no server, it refuses, or the answer breaks off.
    """
    text = f"{prompt.url} has not answered yet; {prompt.url.rstrip('/')}/health says how it is"
    timer = Timer(silent_s, notice, (text,))
    timer.daemon = True
    timer.start()
    try:
        model = prompt.model or prompt.server.first_model()
        for piece in _stream(prompt, model):
            timer.cancel()
            yield piece
    finally:
        timer.cancel()


def _stream(prompt: ChatPrompt, model: str) -> Iterator[str]:
    optional = {
        "max_tokens": prompt.max_tokens,
        "temperature": prompt.temperature,
        "seed": prompt.seed,
    }
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _content(prompt)}],
        "stream": True,
        **{name: value for name, value in optional.items() if value is not None},
    }
    for delta in deltas(prompt.server, body):
        if text := delta.get("content"):
            yield text


def deltas(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pieces of a streamed answer to a chat.

    Raises:
        DalSegnoError: there is no server, it refuses, or the answer breaks off.
    """
    with server.request("POST", "/v1/chat/completions", json.dumps(body)) as response:
        for event in server.events(response):
            for choice in event.get("choices", []):
                yield choice.get("delta", {})


def _content(prompt: ChatPrompt) -> Any:
    """The content of the message; large files are stored on the server meanwhile."""
    return message_content(prompt.text, prompt.files, lambda *file: store_file(prompt.server, *file))


def store_file(server: Server, path: Path, digest: str) -> None:
    """Store a file on the server, under its digest.

    Raises:
        DalSegnoError: there is no server, or it refuses.
    """
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(path.stat().st_size)}
    with (
        path.open("rb") as file,
        server.request("PUT", f"/v1/files/file-{digest}", file, headers) as response,
    ):
        response.read()
