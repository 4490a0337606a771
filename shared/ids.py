"""Types of ids, and the rules for texts that can be tokens of a NATS subject."""

import re
from typing import Final, NewType

from shared.errors import ClientError

RequestId = NewType("RequestId", str)
"""A request's id: one token of a NATS subject."""
Rank = NewType("Rank", int)
"""A worker's number: of a GPU, or of a CPU process."""
Incarnation = NewType("Incarnation", int)
"""One run of a rank's process: the log sequence number of its `worker.joined`."""

ID_PATTERN: Final = r"\A[A-Za-z0-9_-]{1,64}\Z"
MAX_SUBJECT_TOKEN_BYTES: Final = 256
_TOKEN: Final = re.compile(ID_PATTERN)


def is_token(text: str) -> bool:
    """Return whether `text` is a valid token of a subject: 1 to 64 letters, digits, `_` or `-`."""
    return _TOKEN.fullmatch(text) is not None


def is_prefix(text: str) -> bool:
    """Return whether `text` is a valid deployment prefix: a token in lower case.

    The stream's name is the prefix in capitals. So `ds` and `DS` would be two deployments on one stream,
    and the second one would take the stream from the first.
    """
    return is_token(text) and text == text.lower()


def is_addressable(text: str) -> bool:
    """Return whether an event could be stored under `text`, even if it is not a valid id.

    A client can store a message under a subject on which nothing can be published afterwards: one that
    reads as a wildcard, or one that leaves no space for a reply subject in a protocol line (4 KiB).
    """
    plain = text.isprintable() and not set(" .*>") & set(text)
    return plain and 1 <= len(text.encode()) <= MAX_SUBJECT_TOKEN_BYTES


def parse_request_id(text: str) -> RequestId:
    """Return `text` as a request id.

    Raises:
        ClientError: `text` cannot be a subject token.
    """
    if not is_token(text):
        raise ClientError(
            f"request_id {text[:80]!r} cannot be used: expected 1 to 64 letters, digits, '_' or '-'",
            code="invalid_request_id",
        )
    return RequestId(text)
