"""Resuming: a client that lost its connection says what it has, and is told what comes behind.

The position of a stream is the index of the last chunk that was told: of the only choice, or of each,
separated by commas, `-` where there is none yet (`3,7,-`). It is the `id` of server-sent events, comes back
as `Last-Event-ID`, and is the same at every gateway, because the log gave the indices.
"""

import re
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from gateway.errors import InvalidParamError
from shared.misfit import described

HEADER: Final = "last-event-id"
_NONE: Final = -1
_INDEX: Final = re.compile(r"-|[0-9]{1,18}")


@dataclass(slots=True)
class Position:
    """How far a stream was told: per choice the index of the last chunk, -1 before the first."""

    last: list[int]

    @classmethod
    def start(cls, choices: int) -> "Position":
        """Nothing was told yet."""
        return cls([_NONE] * choices)

    def has_begun(self, choice: int) -> bool:
        """Whether anything of a choice was told."""
        return self.last[choice] > _NONE

    def has(self, choice: int, index: int) -> bool:
        """Whether a chunk was told."""
        return index <= self.last[choice]

    def advance(self, choice: int, index: int) -> None:
        """A chunk is told now."""
        self.last[choice] = index

    def __str__(self) -> str:
        return ",".join("-" if index == _NONE else str(index) for index in self.last)


def asked_for(request: Request, choices: int, *, is_stream: bool, id_is_chosen: bool) -> Position:
    """Where a request wants its stream to begin: its header `Last-Event-ID`, or `after` in its query.

    Raises:
        InvalidParamError: that is no position, or there is nothing to resume.
    """
    name = HEADER if HEADER in request.headers else "after"
    text = request.headers.get(HEADER, request.query_params.get("after", ""))
    if not text:
        return Position.start(choices)
    if not is_stream:
        raise InvalidParamError(
            name, f"{name}: expected none where the answer is no stream, found {text!r:.80}"
        )
    if not id_is_chosen:
        raise InvalidParamError(
            name, f"{name}: expected the request_id of the stream to resume in the body, found none"
        )
    indices = [index.strip() for index in text.split(",")]
    if len(indices) != choices or not all(map(_INDEX.fullmatch, indices)):
        shape = "the index of a chunk" if choices == 1 else f"{choices} indices of chunks or '-', by choice"
        raise InvalidParamError(name, f"{name}: expected {shape}, found {described(text)}")
    return Position([_NONE if index == "-" else int(index) for index in indices])
