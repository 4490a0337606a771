"""GGUF files as checkpoint folders: each is converted once, and the folder kept in the user's caches.

The folder's name has a digest of the file's path, size and time, so that a replaced file is converted again.
The conversion is a process of its own: it imports torch and transformers, which the launcher does without.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from configs.deployment import ConfigError
from models.checkpoints.files import CONFIG, CheckpointError
from models.checkpoints.weights import read_shards
from models.gguf.parts import name_of, parts_of

_GIB: Final = 1 << 30
_FORM: Final = b"groups of four to eight bits, of all layers with kernels, digits apart, code books"
"""The name of what conversions write; another one makes them anew."""


def converted(file: Path, cache_home: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint folder of a GGUF file, made if there is none yet; `say` is told that it takes a while.

    Raises:
        ConfigError: the file cannot be converted.
        CheckpointError: a part of the model is missing.
    """
    file = file.resolve()
    digest = blake2b(_FORM, digest_size=8)
    size = 0
    for part in parts_of(file):
        found = part.stat()
        size += found.st_size
        digest.update(f"{part}|{found.st_size}|{found.st_mtime_ns}|".encode())
    folder = cache_home / "dalsegno" / "gguf" / digest.hexdigest() / name_of(file)
    if folder.exists():
        if _is_whole(folder):
            return folder
        shutil.rmtree(folder)
    say(f"{file.name} ({size / _GIB:.1f} GiB) is converted once, in {folder}")
    command = [sys.executable, "-P", "-m", "models.gguf.conversion", str(file), str(folder)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode != 0:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise ConfigError(last or f"{file}: the conversion ended with status {ended.returncode}")
    return folder


def _is_whole(folder: Path) -> bool:
    """True if a folder has all that a conversion writes: files may have been damaged or deleted since."""
    try:
        return (folder / CONFIG).is_file() and bool(read_shards(folder))
    except CheckpointError:
        return False
