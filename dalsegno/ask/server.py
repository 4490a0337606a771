"""One HTTP request to a server, with the standard library alone, for `dalsegno ask` and `transcribe`.

The commands start quickly, and the code shows how little a client needs. Only connecting has a time limit.
"""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final
from urllib.parse import urlsplit

from dalsegno.client.bearer_token import bearer
from shared.errors import CapacityError, ClientError, DalSegnoError

_CONNECT_S: Final = 10.0


class NoServerError(CapacityError):
    """No server answers at the address, or the connection was lost."""

    code = "no_server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server.

    Attributes:
        api_key: the bearer token, for servers that require one.
    """

    url: str
    api_key: str | None = None

    @contextmanager
    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | IO[bytes] | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; the response is read while the `with` lasts.

        Raises:
            DalSegnoError: there is no server, or it refuses.
        """
        own = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream, */*"}
        if self.api_key is not None:
            own["Authorization"] = bearer(self.api_key)
        try:
            with self._connected() as connection:
                connection.request(method, path, body, own | dict(headers or {}))
                response = connection.getresponse()
                if response.status != http.client.OK:
                    raise _refusal(response.status, response.read())
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise NoServerError(_no_server(self.url, error)) from error

    def events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The server-sent events of a response, up to `[DONE]`.

        Raises:
            DalSegnoError: an event is an error, or the response breaks off.
        """
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise _error_of(event["error"], 500)
            yield event
        raise NoServerError(f"the answer broke off: {self.url} closed the connection before its end")

    def first_model(self) -> str:
        """The name of the server's first model.

        Raises:
            DalSegnoError: there is no server of this kind, or it refuses.
        """
        found: Any = None
        with self.request("GET", "/v1/models") as response:
            found = response.read()
        try:
            return str(json.loads(found)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ClientError(
                f"{self.url} is not a Dal Segno server: GET /v1/models answered without a model"
            ) from error

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ClientError(f"{self.url!r} is not a server address: expected http://host:port")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            connection = kind(parts.hostname, parts.port, timeout=_CONNECT_S)
        except ValueError as error:
            raise ClientError(f"{self.url!r} is not a server address: {error}") from error
        try:
            connection.connect()
            connection.sock.settimeout(None)
            yield connection
        finally:
            connection.close()


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
