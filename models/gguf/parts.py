"""The parts of a model in several GGUF files (`name-00001-of-00003.gguf`). No torch."""

import re
from pathlib import Path
from typing import Final

from models.checkpoints.files import CheckpointError

_PART: Final = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.gguf$")


def parts_of(file: Path) -> list[Path]:
    """All files of a model, given one of them, in their order.

    Raises:
        CheckpointError: one is missing.
    """
    found = _PART.match(file.name)
    if found is None:
        return [file]
    stem, _, count = found.groups()
    parts = [file.with_name(f"{stem}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{file.parent} lacks {', '.join(missing)}: expected all {count} parts of {stem}"
        )
    return parts


def name_of(file: Path) -> str:
    """The name of the model in a file, without the number of a part."""
    found = _PART.match(file.name)
    return file.stem if found is None else found[1]
