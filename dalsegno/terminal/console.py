"""The terminal and the log files of the roles that a launcher runs.

    gateway   | 2026-11-20 09:13:38.123 INFO  listening on http://127.0.0.1:8000
    dalsegno  | 2026-11-20 09:14:02.500 WARNING worker-0 was killed by SIGKILL; it starts again in 0.2 s

The lines of a role go to the terminal behind its name, and as they are to `<logs>/<role>.log`. Where logs
are JSON, each line is one object, also on the terminal: what is none (a traceback, a library's print) is
put into one. A terminal that is gone or a disk that is full loses lines, and stops nothing.
"""

import contextlib
import json
import logging
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

_WIDTH: Final = 9
_COLOURS: Final = {"gateway": "36", "conductor": "35", "worker": "33", "nats": "34", "dalsegno": "32"}
_WEIGHT: Final = logging.getLevelNamesMapping()
_FILE_BYTES: Final = 16 * 2**20
"""A log file that has grown beyond this becomes `<role>.log.1`, and a new one begins."""


@dataclass(slots=True)
class LogFile:
    """One role's file, appended to; at most two of `_FILE_BYTES` are kept."""

    path: Path
    _file: BinaryIO | None = None

    def write(self, line: bytes) -> None:
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        self._file.write(line + b"\n")
        if self._file.tell() > _FILE_BYTES:
            self.close()
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True)
class Console:
    """Writes lines as they come; stderr, because stdout is for what was asked for.

    Attributes:
        is_json: whether a line is an object, for programs.
        level: what matters less is not said by the launcher; roles keep to it themselves.
    """

    logs: Path
    colours: bool = False
    is_json: bool = False
    level: str = "info"
    _files: dict[str, LogFile] = field(default_factory=dict)

    def role(self, name: str, line: bytes) -> None:
        """One line of output of a role."""
        if self.is_json:
            line = _as_object(name, line)
        with contextlib.suppress(OSError):
            self._file(name).write(line)
        with contextlib.suppress(OSError):
            label = "" if self.is_json else f"{self._label(name)} "
            print(f"{label}{line.decode(errors='replace')}", file=sys.stderr, flush=True)

    def say(self, line: str, level: str = "info") -> None:
        """One line of the launcher's own."""
        if _WEIGHT[level.upper()] < _WEIGHT[self.level.upper()]:
            return
        if self.is_json:
            self.role("dalsegno", _object("dalsegno", line, level))
            return
        now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        self.role("dalsegno", f"{now} {level.upper():<5} {line}".encode())

    def show(self, text: str) -> None:
        """What was asked for: to stdout, as it is."""
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> LogFile:
        return self._files.setdefault(name, LogFile(self.logs / f"{name}.log"))

    def _label(self, name: str) -> str:
        label = f"{name:<{_WIDTH}} |"
        colour = _COLOURS.get(name.partition("-")[0], "0")
        return f"\x1b[{colour}m{label}\x1b[0m" if self.colours else label


class WarningHandler(logging.Handler):
    """What is logged in the launcher's own process, from warnings on, as lines of the launcher."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(record.getMessage().replace("\n", " "), record.levelname.lower())


def _as_object(name: str, line: bytes) -> bytes:
    """A line of JSON as it is; any other as the message of one."""
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(line), dict):
            return line
    return _object(name, line.decode(errors="replace"), "info")


def _object(name: str, line: str, level: str) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    said = {"time": now, "level": level, "role": name, "message": line}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
