"""The transport that uvicorn writes to: it counts sent bytes, and closes without a reset."""

import asyncio
from typing import Any


class HalfClosingTransport:
    """The transport of one connection.

    Attributes:
        is_lingering: the sending side is shut down, and received bytes are discarded.
        request_is_open: the client has not sent its whole request.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.is_lingering = False
        self.request_is_open = False
        self._written_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes that are written and not sent yet."""
        return self.transport.get_write_buffer_size()

    @property
    def sent_bytes(self) -> int:
        """Bytes that the kernel has taken for the client so far."""
        return self._written_bytes - self.pending_bytes

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self.transport.write(data)

    def is_closing(self) -> bool:
        return self.is_lingering or self.transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self.request_is_open:
            self.transport.close()
            return
        self.is_lingering = True
        self.transport.write_eof()  # after the bytes that are still to be sent
        self.transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the transport."""
        return getattr(self.transport, name)
