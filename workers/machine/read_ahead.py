"""A checkpoint's weights are on their way into memory while torch is imported: both take seconds.

They are mapped, not read (`models.transformers_lm.tensors`), so that without this the disk would rest
until the first of them is looked at. Nothing depends on it, and nothing of it stays in this process: the
operating system keeps the pages. What is wrong with a file is the loader's to tell.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

from workers.machine import memory

_CHUNK: Final = 2 * 2**20
"""Of a longer range Linux reads no more than the beginning (2026-11: 8 MB of a gigabyte)."""


def begin(checkpoint: Path) -> None:
    """Read the weights in `checkpoint` ahead, in a thread that nobody has to wait for."""
    if hasattr(os, "posix_fadvise"):
        Thread(target=read_ahead, args=(checkpoint,), name="read ahead", daemon=True).start()


def read_ahead(checkpoint: Path, available_bytes: Callable[[], int] = memory.available_bytes) -> None:
    """Have the operating system read them; as many files as there is room for, twice over."""
    with suppress(OSError):
        room = available_bytes() // 2
        for file in sorted(checkpoint.glob("*.safetensors")):
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                room -= size
                if room < 0:
                    return
                for at in range(0, size, _CHUNK):
                    os.posix_fadvise(opened.fileno(), at, _CHUNK, os.POSIX_FADV_WILLNEED)
