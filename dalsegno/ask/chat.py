"""A streaming chat request over HTTP, for `dalsegno ask`: one question, its answer piece by piece.

It uses OpenAI's chat route and only the standard library: the command starts quickly, and the code shows how
little a client needs.

Only connecting has a time limit. An answer may be slow to start (a queue, a long prompt): the server's own
limits end it, and after a few seconds a notice names the health route.
"""

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any, Final
from urllib.parse import urlsplit

from dalsegno.ask.files import message_content
from dalsegno.client.bearer_token import bearer
from shared.errors import CapacityError, ClientError, DalSegnoError

_CONNECT_S: Final = 10.0
_SILENT_S: Final = 5.0


class NoServerError(CapacityError):
    """No server answers at the address, or the connection was lost."""

    code = "no_server"


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
        model = prompt.model or _first_model(prompt)
        for piece in _stream(prompt, model):
            timer.cancel()
            yield piece
    except (OSError, http.client.HTTPException) as error:
        raise NoServerError(_no_server(prompt.url, error)) from error
    finally:
        timer.cancel()


@contextmanager
def _connected(url: str) -> Iterator[http.client.HTTPConnection]:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ClientError(f"{url!r} is not a server address: expected http://host:port")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname, parts.port, timeout=_CONNECT_S)
    except ValueError as error:
        raise ClientError(f"{url!r} is not a server address: {error}") from error
    try:
        connection.connect()
        connection.sock.settimeout(None)
        yield connection
    finally:
        connection.close()


def _headers(prompt: ChatPrompt) -> dict[str, str]:
    authorization = {"Authorization": bearer(prompt.api_key)} if prompt.api_key is not None else {}
    return {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
    } | authorization


def _first_model(prompt: ChatPrompt) -> str:
    url = prompt.url
    with _connected(url) as connection:
        connection.request("GET", "/v1/models", headers=_headers(prompt))
        response = connection.getresponse()
        body = response.read()
    if response.status in {http.client.UNAUTHORIZED, http.client.FORBIDDEN}:
        raise _refusal(response.status, body)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ClientError(
            f"{url} is not a Dal Segno server: GET /v1/models answered {response.status} without a model"
        ) from error


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
    with _connected(prompt.url) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), _headers(prompt))
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _refusal(response.status, response.read())
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield from _texts_in(json.loads(data))
    raise NoServerError(f"the answer broke off: {prompt.url} closed the connection before its end")


def _content(prompt: ChatPrompt) -> Any:
    """The content of the message; large files are stored on the server meanwhile."""

    def store(path: Path, digest: str) -> None:
        with _connected(prompt.url) as connection, path.open("rb") as file:
            headers = _headers(prompt) | {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(path.stat().st_size),
            }
            connection.request("PUT", f"/v1/files/file-{digest}", file, headers)
            response = connection.getresponse()
            body = response.read()
        if response.status != http.client.OK:
            raise _refusal(response.status, body)

    return message_content(prompt.text, prompt.files, store)


def _texts_in(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise _error_of(event["error"], 500)
    for choice in event.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _refusal(status: int, body: bytes) -> DalSegnoError:
    if status == http.client.UNAUTHORIZED:
        return ClientError("this server requires an API key: set it in DALSEGNO_API_KEY", status=status)
    try:
        return _error_of(json.loads(body)["error"], status)
    except (ValueError, KeyError, TypeError):
        return ClientError(f"the server answered {status}: {body[:200].decode(errors='replace')}")


def _error_of(error: Any, status: int) -> DalSegnoError:
    message = error.get("message") if isinstance(error, dict) else None
    return DalSegnoError(str(message or f"the server failed with {error!r}"), status=status)


def _no_server(url: str, error: Exception) -> str:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return f"no server answers at {url} ({why}); start one with `dalsegno serve`, or name it with --url"
