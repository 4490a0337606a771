"""What a log takes, checked before anything is sent: both adapters refuse the same with the same words."""

import re
from typing import Final

from shared.errors import BugError
from shared.log.port import PayloadTooLargeError
from shared.subjects import Subjects

_SUBJECT: Final = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)+")


class Acceptance:
    """The door of one deployment's log."""

    def __init__(self, subjects: Subjects) -> None:
        self._kinds = tuple(subject.removesuffix(">") for subject in subjects.logged())
        self._stream = subjects.stream

    def check(self, subject: str, data: bytes, max_payload: int) -> None:
        """Let an event in.

        Raises:
            PayloadTooLargeError: it has more than `max_payload` bytes.
            BugError: nothing would store it: the log's writers refuse it, or they would try for ever.
        """
        if len(data) > max_payload:
            raise PayloadTooLargeError(
                f"an event of {len(data)} bytes on {subject!r} is too large for the log: the bound is "
                f"{max_payload} bytes; send media by reference, or raise the server's max_payload"
            )
        if not subject.startswith(self._kinds) or _SUBJECT.fullmatch(subject) is None:
            raise BugError(
                f"{subject!r} is not a subject of the stream {self._stream!r}: expected one of "
                f"{', '.join(f'{kind}<token>' for kind in self._kinds)}"
            )
