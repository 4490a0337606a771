"""The Python client: the same calls over HTTP and NATS, asynchronous and synchronous.

    from dalsegno import Client

    with Client("http://127.0.0.1:8000") as client:
        print(client.generate("What does len do?").text)

asynchronous    `AsyncClient`
synchronous     `Client`: the same, on an event loop in a thread
stream          one answer as it arrives, resumed after interruptions
request         the request, in one form for every transport
images          requests for an image
answer          chunks, and the whole answer
media           images and sound, in and out
http_transport  `POST /generate`
nats_transport  publishing, and reading the log
errors          the errors of a request
"""

from dalsegno.client.answer import Answer, Chunk, Ranked
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
    "Ranked",
    "RequestCancelledError",
    "RequestExpiredError",
    "ServerError",
    "Stream",
    "UnreachableError",
    "Usage",
]
