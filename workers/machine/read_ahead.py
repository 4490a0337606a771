"""Read-ahead of a checkpoint's weights into memory while torch is imported; both take seconds.

The weights are mapped, not read (`models.transformers_lm.tensors`), so without this the disk would idle until
the first access. Nothing depends on it, and no memory of this process is used: the operating system keeps the
pages. The loader reports damaged files.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

from workers.machine import memory

_CHUNK: Final = 2 * 2**20
"""Of a longer range Linux reads only the first part (2026-11: 8 MB of a gigabyte)."""


def begin(checkpoint: Path) -> None:
    """Read the weights in `checkpoint` ahead, in a thread that needs no join."""
    if hasattr(os, "posix_fadvise"):
        Thread(target=read_ahead, args=(checkpoint,), name="read ahead", daemon=True).start()


def read_ahead(checkpoint: Path, available_bytes: Callable[[], int] = memory.available_bytes) -> None:
    """Let the operating system read the files, as many as fit in half of the available memory."""
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
