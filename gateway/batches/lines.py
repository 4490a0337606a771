"""The lines of a batch's file. Pure.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., ...}}

A line is checked on its own: one that is broken gets an error as its result, and the others run. Blank lines
are left out, and not counted.
"""

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from shared.errors import ClientError
from shared.validation_errors import described, validation_problem

MAX_LINES: Final = 50_000
"""OpenAI's limit."""
_BOM: Final = b"\xef\xbb\xbf"
_NOT_IN_LINES: Final = ("stream", "background", "request_id", "linger_s")
"""Fields of bodies that have no meaning in a batch."""


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: dict[str, Any]


class _Body(msgspec.Struct):
    """The body as the client wrote it."""

    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that can be asked.

    Attributes:
        number: from 1.
        body: JSON.
        requests: about how many requests on the log it makes: answers of each prompt.
        has_low_priority: it asks for a lower priority than the usual one.
    """

    number: int
    custom_id: str
    body: bytes
    requests: int = 1
    has_low_priority: bool = False


class BrokenLineError(ClientError):
    """A line that cannot be asked."""

    code = "invalid_line"

    def __init__(
        self, number: int, message: str, custom_id: str | None = None, code: str = "invalid_line"
    ) -> None:
        super().__init__(f"line {number}: {message}", code=code)
        self.custom_id = custom_id


async def lines_of(
    chunks: AsyncIterable[bytes], max_bytes: int
) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Iterate over the lines of a file, with their numbers from 1; None stands for one beyond `max_bytes`."""
    number, held, is_long = 0, bytearray(), False
    async for piece, is_end in _pieces(chunks):
        is_long = is_long or len(held) + len(piece) > max_bytes
        if not is_long:
            held += piece
        if not is_end:
            continue
        text = bytes(held).removeprefix(b"" if number else _BOM).strip()
        if text or is_long:
            number += 1
            yield number, None if is_long else text
        held.clear()
        is_long = False


async def _pieces(chunks: AsyncIterable[bytes]) -> AsyncGenerator[tuple[bytes, bool], None]:
    """The pieces of lines, and whether each is the last one of its line."""
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for one in ends:
            yield one, True
        yield rest, False
    yield b"", True


def parse_line(number: int, data: bytes | None, endpoint: str, seen: set[str], max_bytes: int) -> BatchLine:
    """Return the request of a line; `seen` are the `custom_id`s of the lines before, and gets this one.

    Raises:
        BrokenLineError: it cannot be asked.
    """
    if data is None:
        raise BrokenLineError(number, f"expected at most {max_bytes} bytes (gateway.max_body_bytes)")
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BrokenLineError(number, f"it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BrokenLineError(number, f"expected a JSON object, found {described(found)}")
    custom_id = found.get("custom_id") if isinstance(found.get("custom_id"), str) else None
    is_repeated = custom_id in seen
    if custom_id:
        seen.add(custom_id)
    try:
        fields = msgspec.convert(found, _Fields)
    except msgspec.ValidationError as error:
        raise BrokenLineError(
            number, validation_problem(error, found, _Fields).message, custom_id or None
        ) from error
    if is_repeated:
        raise BrokenLineError(
            number,
            f"custom_id {fields.custom_id[:80]!r} is that of an earlier line; expected one of its own",
            fields.custom_id,
            code="duplicate_custom_id",
        )
    _check(number, fields, endpoint)
    priority = fields.body.get("priority")
    return BatchLine(
        number,
        fields.custom_id,
        bytes(msgspec.json.decode(data, type=_Body).body),
        requests=_requests(fields.body),
        has_low_priority=isinstance(priority, int) and priority < 0,
    )


def _requests(body: dict[str, Any]) -> int:
    """The answers that a body asks for, as far as that can be told before its route reads it."""
    answers = body.get("n")
    lists = [found for name in ("prompt", "input") if isinstance(found := body.get(name), list)]
    prompts = max((len(found) for found in lists), default=1)
    return max(1, prompts) * (answers if isinstance(answers, int) and answers > 1 else 1)


def _check(number: int, fields: _Fields, endpoint: str) -> None:
    if fields.method.upper() != "POST":
        raise BrokenLineError(
            number, f"method: expected 'POST', found {described(fields.method)}", fields.custom_id
        )
    if fields.url != endpoint:
        raise BrokenLineError(
            number,
            f"url: expected the endpoint of the batch, {endpoint!r}, found {described(fields.url)}",
            fields.custom_id,
        )
    for name in _NOT_IN_LINES:
        if fields.body.get(name):
            raise BrokenLineError(
                number,
                f"body.{name}: expected none in a batch, found {described(fields.body[name])}",
                fields.custom_id,
                code="not_supported",
            )
