"""The client: the same calls over HTTP and over NATS, for programs with an event loop and without.

    from dalsegno import Client

    with Client("http://127.0.0.1:8000") as client:
        print(client.generate("What does len do?").text)

asynchronous  `AsyncClient`
synchronous   `Client`: the same, on an event loop in a thread
stream        one answer as it comes, taken up again where it breaks
question      what is asked
answer        what comes back: chunks, and the whole
media         images and sound, in and out
over_http     `POST /generate`
over_nats     publish, and read the log
errors        what can go wrong
"""

from dalsegno.client.answer import Answer, Chunk
from dalsegno.client.asynchronous import AsyncClient
from dalsegno.client.errors import (
    AuthenticationError,
    BrokenError,
    BusyError,
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    RequestCancelledError,
    RequestExpiredError,
    ServerError,
    UnreachableError,
)
from dalsegno.client.media import Audio, Medium
from dalsegno.client.stream import AsyncStream
from dalsegno.client.synchronous import Client, Stream
from dalsegno.client.transport import Health
from shared.events import Usage
from shared.log.nats.credentials import Credentials

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Audio",
    "AuthenticationError",
    "BrokenError",
    "BusyError",
    "Chunk",
    "Client",
    "ConflictError",
    "Credentials",
    "DeadlineExceededError",
    "Health",
    "Medium",
    "NotFoundError",
    "RequestCancelledError",
    "RequestExpiredError",
    "ServerError",
    "Stream",
    "UnreachableError",
    "Usage",
]
