"""The sizes of pictures and videos as requests state them: `1024x768`, width before height."""

import re
from typing import Final

_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)


def sides_of(size: str) -> tuple[int, int] | None:
    """The width and height in pixels of `WIDTHxHEIGHT`; None for any other text."""
    found = _SIZE.fullmatch(size)
    return (int(found[1]), int(found[2])) if found is not None else None
