"""Distinct identities are distinct types, and only what can be a subject token is an id."""

import re
from typing import Final, NewType

from shared.errors import ClientError

RequestId = NewType("RequestId", str)
"""One request: one token of a NATS subject."""
Rank = NewType("Rank", int)
"""One worker position: a GPU, or a CPU process."""
Incarnation = NewType("Incarnation", int)
"""One life of a rank's process: the log sequence of its `worker.joined`."""
Epoch = NewType("Epoch", int)
"""One conductor's term of office, counted from 1."""
Seq = NewType("Seq", int)
"""A position in the log, counted from 1."""

ID_PATTERN: Final = r"\A[A-Za-z0-9_-]{1,64}\Z"
_TOKEN: Final = re.compile(ID_PATTERN)


def is_token(text: str) -> bool:
    """Whether `text` may be one token of a subject: letters, digits, `_`, `-`; 1 to 64 of them."""
    return _TOKEN.fullmatch(text) is not None


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
