"""The pictures in docs/, which `make screenshots` draws; each keeps the digest of what it was drawn from.

Fonts differ between machines, so that pixels are not compared.
"""

import os
from pathlib import Path
from typing import Final

from PIL import Image, PngImagePlugin

_DIGEST: Final = "drawn from"
"""The key of the digest in a picture."""
_COLOURS: Final = 128


def draws() -> bool:
    """True if the pictures are to be drawn now."""
    return bool(os.environ.get("DRAW_SCREENSHOTS"))


def keep(file: Path, digest: str) -> None:
    """Make a screenshot small, and note what it was drawn from."""
    kept = PngImagePlugin.PngInfo()
    kept.add_text(_DIGEST, digest)
    with Image.open(file) as drawn:
        drawn.quantize(_COLOURS).save(file, optimize=True, pnginfo=kept)


def is_drawn_from(file: Path, size: tuple[int, int], digest: str) -> None:
    """Assert that a picture is not older than what it shows."""
    with Image.open(file) as found:
        assert found.size == size
        assert found.info.get(_DIGEST) == digest, f"{file.name} is old: `make screenshots` draws it"
