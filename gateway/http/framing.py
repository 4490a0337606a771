"""Answers to HTTP/1.0: its clients know no chunks, so the end of the connection ends the body."""

from typing import TYPE_CHECKING

from starlette.types import Message

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def end_by_close(cycle: "RequestResponseCycle") -> None:
    """Send an answer without a `content-length` as it is, where uvicorn would send chunks."""
    cycle.waiting_for_100_continue = False  # there are no interim answers either
    to_server = cycle.send
    is_unframed = False

    async def send(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_unframed:
                cycle.chunked_encoding = False
        elif is_unframed:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares the two
        await to_server(message)  # type: ignore[arg-type] # uvicorn's type of the same message

    cycle.send = send  # type: ignore[assignment, method-assign] # before its task begins
