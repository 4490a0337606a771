"""Resuming: a client that lost its connection says what it has, and is told what comes behind.

The position of a stream says how far each of its choices was told, separated by commas (`3,e,-`):

    -      nothing of it
    b      that it begins, which is an event of its own where there is a role to tell
    17     its chunk 17, and all before
    e      all of it, and why it ended

and `end` when all of them have ended and the usage was told, too. It is the `id` of each server-sent event,
comes back as `Last-Event-ID`, and is the same at every gateway, because the log gave the indices.

What has no events, a file of sound, has bytes: its position is how many of them its client has.
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
class Position:
    """How far a stream was told.

    Attributes:
        last: of each choice the index of the last chunk, or one of the words of this module as a number.
        is_complete: its usage was told.
    """

    last: list[int]
    is_complete: bool = False

    @classmethod
    def start(cls, choices: int) -> "Position":
        """Nothing was told yet."""
        return cls([_NOTHING] * choices)

    def has_any(self, choice: int) -> bool:
        """Whether anything of a choice was told, if only that it begins."""
        return self.last[choice] > _NOTHING

    def has(self, choice: int, index: int) -> bool:
        """Whether a chunk was told."""
        return index <= self.last[choice]

    def has_ended(self, choice: int) -> bool:
        """Whether it was told why a choice ended."""
        return self.last[choice] == _ENDED

    def begin(self, choice: int) -> None:
        """It is told now that a choice begins."""
        self.last[choice] = _BEGUN

    def advance(self, choice: int, index: int) -> None:
        """A chunk is told now."""
        self.last[choice] = index

    def end(self, choice: int) -> None:
        """It is told now why a choice ended."""
        self.last[choice] = _ENDED

    def complete(self) -> None:
        """The usage is told now."""
        self.is_complete = True

    def __str__(self) -> str:
        if self.is_complete:
            return _COMPLETE
        return ",".join(_WORDS.get(index) or str(index) for index in self.last)


def asked_for(request: Request, choices: int, *, is_stream: bool, id_is_chosen: bool) -> Position:
    """Where a request wants its stream to begin: its header `Last-Event-ID`, or `after` in its query.

    Raises:
        InvalidParamError: that is no position, or there is nothing to resume.
    """
    name, text = _told(request)
    if not text:
        return Position.start(choices)
    _check_may_resume(name, text, is_stream=is_stream, id_is_chosen=id_is_chosen)
    if text == _COMPLETE:
        return Position([_ENDED] * choices, is_complete=True)
    indices = [index.strip() for index in text.split(",")]
    if len(indices) != choices or not all(map(_INDEX.fullmatch, indices)):
        shape = "the index of a chunk" if choices == 1 else f"{choices} indices of chunks or '-', by choice"
        raise InvalidParamError(name, f"{name}: expected {shape}, found {described(text)}")
    return Position([_VALUES[index] if index in _VALUES else int(index) for index in indices])


def asked_for_bytes(request: Request, *, is_stream: bool, id_is_chosen: bool) -> int:
    """How many bytes of an answer a client has; said as `asked_for` has it.

    Raises:
        InvalidParamError: that is no number of bytes, or there is nothing to resume.
    """
    name, text = _told(request)
    if not text:
        return 0
    _check_may_resume(name, text, is_stream=is_stream, id_is_chosen=id_is_chosen)
    if not _BYTES.fullmatch(text):
        raise InvalidParamError(name, f"{name}: expected a number of bytes, found {described(text)}")
    return int(text)


def _told(request: Request) -> tuple[str, str]:
    name = HEADER if HEADER in request.headers else "after"
    return name, request.headers.get(HEADER, request.query_params.get("after", "")).strip()


def _check_may_resume(name: str, text: str, *, is_stream: bool, id_is_chosen: bool) -> None:
    if not is_stream:
        raise InvalidParamError(
            name, f"{name}: expected none where the answer is no stream, found {text!r:.80}"
        )
    if not id_is_chosen:
        raise InvalidParamError(
            name, f"{name}: expected the request_id of the stream to resume in the body, found none"
        )
