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

ID_PATTERN: Final = r"\A[A-Za-z0-9_-]{1,64}\Z"
MAX_SUBJECT_TOKEN_BYTES: Final = 256
_TOKEN: Final = re.compile(ID_PATTERN)


def is_token(text: str) -> bool:
    """Whether `text` may be one token of a subject: letters, digits, `_`, `-`; 1 to 64 of them."""
    return _TOKEN.fullmatch(text) is not None


def is_prefix(text: str) -> bool:
    """Whether `text` may name a deployment: a token in small letters.

    The stream is named by the prefix in capitals, so `ds` and `DS` would be two deployments on one stream,
    and the second to be provisioned would take it from the first.
    """
    return is_token(text) and text == text.lower()


def is_addressable(text: str) -> bool:
    """Whether something can be stored under `text` at all, though it may be no id of ours.

    Any client can store a message under a subject that no client may publish on twice: one that reads as
    a wildcard, or that leaves no room for a reply in a line of the protocol (4 KiB).
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
