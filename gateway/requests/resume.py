"""Resuming: a client that lost its connection sends its position, and gets the rest of the stream.

The position of a stream says for each choice how far it was sent, separated by commas (`3,e,-`):

    -      nothing
    b      its first event, which is separate where there is a role to send
    17     its chunk 17, and all before it
    e      all of it, and its finish reason

and `end` after the ends of all choices and the usage. It is the `id` of each server-sent event, and returns
as `Last-Event-ID`. All gateways have the same positions, because the indices come from the log.

The position of an audio file, which has no events, is the number of bytes that the client has.
"""

import re
import sys
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from gateway.errors import InvalidParamError
from shared.validation_errors import described

HEADER: Final = "last-event-id"
_NOTHING: Final = -2
_BEGUN: Final = -1
_ENDED: Final = sys.maxsize
_WORDS: Final = {_NOTHING: "-", _BEGUN: "b", _ENDED: "e"}
_VALUES: Final = {word: value for value, word in _WORDS.items()}
_COMPLETE: Final = "end"
_INDEX: Final = re.compile(r"-|b|e|[0-9]{1,18}")
_BYTES: Final = re.compile(r"[0-9]{1,18}")


@dataclass(slots=True)
class StreamPosition:
    """The position of a stream.

    Attributes:
        last: for each choice the index of its last chunk, or one of this module's words as a number.
        is_complete: the usage was sent.
    """

    last: list[int]
    is_complete: bool = False

    @classmethod
    def start(cls, choices: int) -> "StreamPosition":
        """The position before the first event."""
        return cls([_NOTHING] * choices)

    def has_any(self, choice: int) -> bool:
        """True if anything of a choice was sent, be it only its beginning."""
        return self.last[choice] > _NOTHING

    def has(self, choice: int, index: int) -> bool:
        """True if this chunk was sent."""
        return index <= self.last[choice]

    def has_ended(self, choice: int) -> bool:
        """True if the finish reason of a choice was sent."""
        return self.last[choice] == _ENDED

    def begin(self, choice: int) -> None:
        """Set the position after the beginning of a choice."""
        self.last[choice] = _BEGUN

    def advance(self, choice: int, index: int) -> None:
        """Set the position after a chunk."""
        self.last[choice] = index

    def end(self, choice: int) -> None:
        """Set the position after the finish reason of a choice."""
        self.last[choice] = _ENDED

    def complete(self) -> None:
        """Set the position after the usage."""
        self.is_complete = True

    def __str__(self) -> str:
        if self.is_complete:
            return _COMPLETE
        return ",".join(_WORDS.get(index) or str(index) for index in self.last)


def requested_position(
    request: Request, choices: int, *, is_stream: bool, id_is_chosen: bool
) -> StreamPosition:
    """The position after which a stream is to begin: the header `Last-Event-ID`, or `after` in the query.

    Raises:
        InvalidParamError: it is no position, or there is nothing to resume.
    """
    name, text = _position_text(request)
    if not text:
        return StreamPosition.start(choices)
    _check_may_resume(name, text, is_stream=is_stream, id_is_chosen=id_is_chosen)
    if text == _COMPLETE:
        return StreamPosition([_ENDED] * choices, is_complete=True)
    indices = [index.strip() for index in text.split(",")]
    if len(indices) != choices or not all(map(_INDEX.fullmatch, indices)):
        shape = "the index of a chunk" if choices == 1 else f"{choices} indices of chunks or '-', by choice"
        raise InvalidParamError(name, f"{name}: expected {shape}, found {described(text)}")
    return StreamPosition([_VALUES[index] if index in _VALUES else int(index) for index in indices])


def requested_offset(request: Request, *, is_stream: bool, id_is_chosen: bool) -> int:
    """The number of bytes that a client has; sent in the same places as a position.

    Raises:
        InvalidParamError: it is no number of bytes, or there is nothing to resume.
    """
    name, text = _position_text(request)
    if not text:
        return 0
    _check_may_resume(name, text, is_stream=is_stream, id_is_chosen=id_is_chosen)
    if not _BYTES.fullmatch(text):
        raise InvalidParamError(name, f"{name}: expected a number of bytes, found {described(text)}")
    return int(text)


def _position_text(request: Request) -> tuple[str, str]:
    name = HEADER if HEADER in request.headers else "after"
    return name, request.headers.get(HEADER, request.query_params.get("after", "")).strip()


def _check_may_resume(name: str, text: str, *, is_stream: bool, id_is_chosen: bool) -> None:
    if not is_stream:
        raise InvalidParamError(
            name, f"{name}: expected none for an answer that is not streamed, found {text!r:.80}"
        )
    if not id_is_chosen:
        raise InvalidParamError(
            name, f"{name}: expected the request_id of the stream to resume in the body, found none"
        )
