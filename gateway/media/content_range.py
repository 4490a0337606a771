"""The position of an upload's bytes in its file, from the request header `Content-Range` (RFC 9110, 14.5)."""

import re
from dataclasses import dataclass
from typing import Final

from gateway.errors import InvalidParamError

_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class UploadRange:
    """The first byte of the body in the file, and the size of the file; None if it is not given."""

    start: int = 0
    total: int | None = None


def parse(header: str | None) -> UploadRange:
    """Parse the header; without one the body is the whole file.

    Raises:
        InvalidParamError: the header is malformed, or the body does not reach to the end of the file.
    """
    if header is None:
        return UploadRange()
    found = _RANGE.fullmatch(header.strip())
    if found is None:
        raise _wrong(f"expected `bytes FIRST-LAST/SIZE`, found {header[:80]!r}")
    first, last, total = (int(one) for one in found.groups())
    if not first <= last < total:
        raise _wrong(f"expected positions within the file, found {header[:80]!r}")
    if last != total - 1:
        raise _wrong(f"expected all bytes up to the end of the file, found {header[:80]!r}")
    return UploadRange(first, total)


def _wrong(problem: str) -> InvalidParamError:
    return InvalidParamError("content-range", f"content-range: {problem}")
