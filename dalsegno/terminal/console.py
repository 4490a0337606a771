"""The launcher's console: lines of all role processes on the terminal and in log files.

    gateway   | 2026-11-20 09:13:38.123 INFO  listening on http://127.0.0.1:8000
    dalsegno  | 2026-11-20 09:14:02.500 WARNING worker-0 was killed by SIGKILL; it is restarted in 0.2 s

A role's line goes to the terminal with the role's name, and unchanged to `<logs>/<role>.log`. With JSON logs,
each line is one object, also on the terminal: another line (a traceback, a library's print) becomes
the message of one. A closed terminal or a full disk loses lines, and stops nothing.
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
    """One role's log file, appended to; at most two files of `_FILE_BYTES` are kept."""

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
    """Writes lines as they arrive, to stderr: stdout is for requested output.

    Attributes:
        is_json: each line is a JSON object.
        level: the least level of the launcher's own lines; roles filter theirs themselves.
    """

    logs: Path
    colours: bool = False
    is_json: bool = False
    level: str = "info"
    _files: dict[str, LogFile] = field(default_factory=dict)

    def role(self, name: str, line: bytes) -> None:
        """Write one line of a role's output."""
        if self.is_json:
            line = _as_object(name, line)
        with contextlib.suppress(OSError):
            self._file(name).write(line)
        with contextlib.suppress(OSError):
            label = "" if self.is_json else f"{self._label(name)} "
            print(f"{label}{line.decode(errors='replace')}", file=sys.stderr, flush=True)

    def say(self, line: str, level: str = "info") -> None:
        """Write one line of the launcher's own."""
        if _WEIGHT[level.upper()] < _WEIGHT[self.level.upper()]:
            return
        if self.is_json:
            self.role("dalsegno", _object("dalsegno", line, level))
            return
        now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        self.role("dalsegno", f"{now} {level.upper():<5} {line}".encode())

    def show(self, text: str) -> None:
        """Write requested output to stdout, unchanged."""
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
    """Logging handler that shows warnings of the launcher's own process as console lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(record.getMessage().replace("\n", " "), record.levelname.lower())


def _as_object(name: str, line: bytes) -> bytes:
    """Return a line of JSON unchanged, and any other line as the message of an object."""
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(line), dict):
            return line
    return _object(name, line.decode(errors="replace"), "info")


def _object(name: str, line: str, level: str) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = {"time": now, "level": level, "role": name, "message": line}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
