"""The progress of a download: one line that is rewritten on a terminal, a line every tenth elsewhere."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

_EVERY_S: Final = 0.2
_TENTHS: Final = 10

Say = Callable[[str], None]


class Progress:
    """Counts the bytes of several files that are downloaded at once; threads call `add`."""

    def __init__(self, what: str, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self._what, self._total, self._done, self._began = what, total, done, done
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._since_s = self._shown_s = time.monotonic()
        self._tenth = -1

    def add(self, count: int) -> None:
        """Count bytes; negative ones have to be downloaded again."""
        with self._lock:
            self._done += count
            now_s = time.monotonic()
            tenth = self._done * _TENTHS // max(self._total, 1)
            if now_s - self._shown_s >= _EVERY_S if self._is_terminal else tenth > self._tenth:
                self._shown_s, self._tenth = now_s, tenth
                self._show(now_s)

    def end(self) -> None:
        """Show the last state."""
        with self._lock:
            if self._is_terminal:
                self._show(time.monotonic())
                self._stream.write("\n")
            self._stream.flush()

    def _show(self, now_s: float) -> None:
        speed = (self._done - self._began) / max(now_s - self._since_s, 1e-3)
        line = f"{self._what}: {in_words(self._done)} of {in_words(self._total)}, {in_words(int(speed))}/s"
        self._stream.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()


def in_words(count: int) -> str:
    """A number of bytes, such as `1.2 GB`."""
    size = float(max(count, 0))
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
