"""The results of a batch's lines, in OpenAI's form, and those of a segment on their way to the store.

A segment's results are written as they come, in memory or in a temporary file, and read in the order of the
lines.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final

import msgspec

from gateway.batches.answer_usage import answer_usage
from gateway.requests.usage import UsageTally
from shared.events import Usage

SEGMENT_LINES: Final = 500
"""The lines of a segment. After a crash, only lines of segments that are not stored are asked for again."""
CANCELLED: Final = "batch_cancelled"
EXPIRED: Final = "batch_expired"
"""The codes of lines that got no answer."""
_IN_MEMORY_BYTES: Final = 1 << 20
_ERRORS_FROM: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The result of one line: the response of its request, or an error without one.

    Attributes:
        number: the line's, from 1.
        request_id: its request's id on the log.
        code: of the error.
    """

    number: int
    custom_id: str | None
    request_id: str
    status: int = 0
    body: bytes = b""
    code: str = ""
    message: str = ""

    @property
    def is_error(self) -> bool:
        return bool(self.code) or self.status >= _ERRORS_FROM

    def encoded(self) -> bytes:
        """The line of the file of answers, or of errors."""
        response: dict[str, Any] | None = None
        if not self.code:
            response = {
                "status_code": self.status,
                "request_id": self.request_id,
                "body": msgspec.Raw(_in_one_line(self.body)),
            }
        error = {"code": self.code, "message": self.message} if self.code else None
        return msgspec.json.encode(
            {
                "id": f"batch_req_{self.request_id}",
                "custom_id": self.custom_id,
                "response": response,
                "error": error,
            }
        )


def _in_one_line(body: bytes) -> bytes:
    """JSON without line breaks, which stand between its tokens only."""
    return body.replace(b"\r", b"").replace(b"\n", b"")


def segment_of(line: int) -> int:
    """The number of a line's segment, from 0."""
    return (line - 1) // SEGMENT_LINES


def lines_of_segment(segment: int, lines: int) -> int:
    """The number of lines of a segment of a batch with `lines` lines."""
    return min(SEGMENT_LINES, lines - segment * SEGMENT_LINES)


class SegmentResults:
    """The results of one segment, which has `lines` lines.

    Attributes:
        expired: the number of lines that were too late for an answer.
        models: the names of the models that answered.
    """

    def __init__(self, segment: int, lines: int) -> None:
        self.segment = segment
        self.lines = lines
        self._file: IO[bytes] = SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - `close` does
        self.expired = 0
        self.models: set[str] = set()
        self._usage = UsageTally(n=1)
        self._places: dict[int, tuple[int, int, bool]] = {}  # by line: position, size, is an error

    @property
    def failed(self) -> int:
        """The number of errors."""
        return sum(is_error for _, _, is_error in self._places.values())

    @property
    def completed(self) -> int:
        """The number of answers."""
        return len(self._places) - self.failed

    @property
    def usage(self) -> Usage:
        """The tokens of the answers."""
        return self._usage.usage

    @property
    def is_complete(self) -> bool:
        """True if every line has its result."""
        return len(self._places) == self.lines

    def add(self, result: LineResult) -> None:
        """Take the result of one line."""
        data = result.encoded() + b"\n"
        self.expired += result.code == EXPIRED
        self._places[result.number] = self._file.seek(0, 2), len(data), result.is_error
        self._file.write(data)
        if not result.is_error:
            found = answer_usage(result.body)
            self.models |= {found.model} - {""}
            self._usage.add(0, found.usage)

    async def part(self, *, is_error: bool) -> AsyncGenerator[bytes, None]:
        """Iterate over the errors, or the answers, in the order of the lines."""
        for _, (start, size, found) in sorted(self._places.items()):
            if found is is_error:
                self._file.seek(start)
                yield self._file.read(size)

    def close(self) -> None:
        """Free the results."""
        self._file.close()
