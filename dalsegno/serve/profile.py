"""The profile of a deployment: parts written by each process, joined to a file for https://ui.perfetto.dev.

    FILE.parts/gateway.4711  ┐
    FILE.parts/conductor.4712├──> FILE   {"traceEvents": [...]}
    FILE.parts/worker-0.4713 ┘

Each line of a part is one event, or several with commas between (`shared.telemetry.timeline`); a killed
process leaves half a line at the end of its part.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO, Final

from shared.errors import ClientError

_PART: Final = re.compile(r"[a-z]+(-\d+)?\.\d+")
"""The name of a part: a role, and its process id."""


class ProfileError(ClientError):
    """The profile cannot be written to its file."""

    code = "profile"


@contextmanager
def profiled(file: Path | None) -> Iterator[Path | None]:
    """Yield a folder for the parts of all processes started within the block; join them at its end.

    Raises:
        ProfileError: the file cannot be written.
    """
    if file is None:
        yield None
        return
    parts = file.with_name(f"{file.name}.parts").resolve()
    with _written(file):
        file.write_bytes(b"")
        parts.mkdir(exist_ok=True)
        left = list(parts.iterdir())  # from a killed launcher
        if other := next((one.name for one in left if not _PART.fullmatch(one.name)), None):
            raise ProfileError(
                f"--profile: {parts} is for parts of a profile, and contains {other}; name another file"
            )
        for part in left:
            part.unlink()
    try:
        yield parts
    finally:
        with _written(file), file.open("wb") as joined:
            _join(parts, joined)
            rmtree(parts)


@contextmanager
def _written(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProfileError(f"--profile: cannot write {error.filename or file}: {error.strerror}") from error


def _join(parts: Path, joined: BinaryIO) -> None:
    joined.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
    comma = b"\n"
    for part in sorted(parts.iterdir()):
        with part.open("rb") as events:
            for event in events:
                if event.endswith(b"\n"):
                    joined.write(comma + event[:-1])
                    comma = b",\n"
    joined.write(b"\n]}\n")
