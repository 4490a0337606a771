"""The names of media: digests, and the subject tokens of their owners. Pure."""

import hashlib
import re
from typing import Final

NO_TENANT: Final = "none"
"""The owner of the media of requests without a tenant."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_OWNER_DIGITS: Final = 32


def owner_token(tenant: str | None) -> str:
    """Return the subject token of a tenant's media.

    A tenant's name may contain any characters, so its token is `t-` and the first 32 hex digits of the name's
    SHA-256.
    """
    if not tenant:
        return NO_TENANT
    return f"t-{hashlib.sha256(tenant.encode()).hexdigest()[:_OWNER_DIGITS]}"


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 in lower-case hex."""
    return _DIGEST.fullmatch(text) is not None


def check_digest(text: str) -> str:
    """Return `text` if it is a digest.

    Raises:
        ValueError: it is not.
    """
    if not is_digest(text):
        raise ValueError(f"expected a SHA-256 as 64 lower-case hex digits, found {text[:80]!r}")
    return text
