"""What a client needs of the way to the server: HTTP and NATS are two."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dalsegno.client.answer import Chunk, End
from dalsegno.client.request import ClientRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """RequestOptions the server is.

    Attributes:
        is_ready: a request would be served now.
        status: in one word: `loading`, `ready`, `busy`, `degraded`, `draining`.
        missing: what it waits for, in words.
        details: everything it told.
    """

    is_ready: bool
    status: str
    missing: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


class ClientTransport(Protocol):
    """One way to one deployment. What fails raises a `DalSegnoError`."""

    def items(self, question: ClientRequest, after: int) -> AsyncGenerator[Chunk | End, None]:
        """Ask, and give the answer behind the chunk `after` (-1: all of it), in order, and its end.

        Closed before the end, the request is cancelled. It is safe to ask the same question again: under
        one request id it is executed once.

        Raises:
            UnreachableError: nobody is there; nothing was asked.
            BrokenError: the connection was lost; asked again, the answer goes on.
        """
        ...

    async def cancel(self, request_id: str) -> None: ...
    async def health(self) -> Health: ...
    async def models(self) -> list[str]: ...
    async def close(self) -> None: ...
