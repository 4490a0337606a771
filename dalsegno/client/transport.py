"""The transport protocol of the client, implemented over HTTP and over NATS."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dalsegno.client.answer import Chunk, End
from dalsegno.client.request import ClientRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A server's health.

    Attributes:
        is_ready: a request would be served now.
        status: in one word: `loading`, `ready`, `busy`, `degraded`, `draining`.
        missing: descriptions of what it waits for.
        details: the server's whole response.
    """

    is_ready: bool
    status: str
    missing: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


class ClientTransport(Protocol):
    """A connection to one deployment. Failures raise a `DalSegnoError`."""

    def items(self, request: ClientRequest, after: int) -> AsyncGenerator[Chunk | End, None]:
        """Send a request; yield its answer after the chunk `after` (-1: all of it), in order, and its end.

        Closing it before the end cancels the request. Sending the same request again is safe: under one id it
        is executed once.

        Raises:
            UnreachableError: no server answers; nothing was sent.
            BrokenError: the connection was lost; the repeated request resumes the answer.
        """
        ...

    async def cancel(self, request_id: str) -> None: ...
    async def health(self) -> Health: ...
    async def models(self) -> list[str]: ...
    async def close(self) -> None: ...
