"""Checks of an event before it is sent, with the same errors in both implementations of the log."""

import re
from typing import Final

from shared.errors import BugError
from shared.log.port import PayloadTooLargeError
from shared.subjects import Subjects

_SUBJECT: Final = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)+")


class PublishChecks:
    """The checks for one deployment's log."""

    def __init__(self, subjects: Subjects) -> None:
        self._kinds = tuple(subject.removesuffix(">") for subject in subjects.logged())
        self._stream = subjects.stream

    def check(self, subject: str, data: bytes, max_payload: int) -> None:
        """Check that the log can store an event.

        Raises:
            PayloadTooLargeError: the event has more than `max_payload` bytes.
            BugError: no stream has the subject, so its publisher would retry without end.
        """
        if len(data) > max_payload:
            raise PayloadTooLargeError(
                f"an event of {len(data)} bytes on {subject!r} is too large for the log: the limit is "
                f"{max_payload} bytes; store media first (docs/media.md), or raise the server's max_payload"
            )
        if not subject.startswith(self._kinds) or _SUBJECT.fullmatch(subject) is None:
            raise BugError(
                f"{subject!r} is not a subject of the stream {self._stream!r}: expected one of "
                f"{', '.join(f'{kind}<token>' for kind in self._kinds)}"
            )
