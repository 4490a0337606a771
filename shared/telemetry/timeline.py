"""A timeline of everything a process did, for a profile of all processes (`dalsegno serve --profile FILE`).

    step      | schedule | build |      forward      | sample |    work of a thread: one after the other
    publish   |------------------|                                 intervals: many concurrently
    deliver            |--------------|

Each process has one timeline, which its entry point sets up, as with `shared.telemetry.tracing`. A trace
covers one request and goes to a collector; a timeline covers everything and goes to a file. Each process
writes its own file in Chrome's trace event format, which Perfetto reads. A line has one event, or two that
are useless without each other, because a process may be killed within any line. The launcher joins the
files (`dalsegno.serve.profile`). All use the machine's clock, so they fit together.

Times are whole microseconds. Perfetto drops a slice that overlaps another one of its thread by even a
nanosecond, and a float loses fractions of a microsecond once a machine has been up for some months.

Without a profile the cost is one comparison: users keep the result of `recording` from their construction.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

_LOGGER: Final = logging.getLogger(__name__)

MAX_EVENTS: Final = 1_000_000
"""The maximum per process, some 150 MB. A step writes five events, an interval two."""

_encode: Final = msgspec.json.Encoder().encode


class Timeline:
    """One process's timeline, written to a file. Any thread may use it; times are those of `now_s`.

    If the file cannot be written (the disk is full), the timeline ends with a warning, and the process
    continues.
    """

    def __init__(self, file: Path, role: str, *, max_events: int = MAX_EVENTS) -> None:
        self._file: Final = file.open("wb")
        self._pid: Final = os.getpid()
        self._left = max_events
        self._numbers: Final = count()
        self._threads: set[int] = set()
        self._began_s: Final = now_s()
        self._epoch_offset_s: Final = time.time() - now_s()
        self._write({"name": "process_name", "ph": "M", "args": {"name": role}})

    def slice(self, name: str, since_s: float, until_s: float, **args: Any) -> None:
        """Record work of this thread. Slices of a thread are nested, or follow one another."""
        since = _us(since_s)
        self._events(
            {
                "name": name,
                "cat": "work",
                "tid": self._thread(),
                "ph": "X",
                "ts": since,
                "dur": _us(until_s) - since,
                "args": args,
            }
        )

    def interval(self, name: str, kind: str, since_s: float, until_s: float, **args: Any) -> None:
        """Record an interval that may overlap others of its kind."""
        # With a global id, Perfetto would show the interval outside of its process.
        number = {"local": str(next(self._numbers))}
        common = {"name": name, "cat": kind, "tid": self._thread(), "id2": number}
        self._events(
            {**common, "ph": "b", "ts": _us(since_s), "args": args},
            {**common, "ph": "e", "ts": _us(until_s)},
        )

    def hop(self, name: str, subject: str, seq: int, since_s: float, until_s: float) -> None:
        """Record the transfer of an event to or from the log, with its position there."""
        kind, _, of = subject.partition(".")[2].partition(".")
        self.interval(f"{name} {kind}", "log", since_s, until_s, seq=seq, of=of)

    def delivered(self, subject: str, seq: int, stored_ns: int) -> None:
        """Record the delivery of an event that was stored at `stored_ns` (the log's clock) and is read now.

        Events stored before this timeline are ignored.
        """
        stored_s = stored_ns / 1e9 - self._epoch_offset_s
        if stored_s >= self._began_s:
            now = now_s()
            self.hop("deliver", subject, seq, min(stored_s, now), now)

    def close(self) -> None:
        """Flush and close the file. Later events are ignored."""
        try:
            self._file.close()
        except OSError as error:
            self._warn_lost(error)

    def _thread(self) -> int:
        """Return this thread's number; its first event writes the thread's name."""
        number = threading.get_native_id()
        if number not in self._threads:
            self._threads.add(number)
            name = threading.current_thread().name
            self._write({"name": "thread_name", "ph": "M", "tid": number, "args": {"name": name}})
        return number

    def _events(self, *events: dict[str, Any]) -> None:
        """Write all events or none, so that every begin has its end."""
        if self._left <= 0:
            return
        self._left -= len(events)
        self._write(*events)
        if self._left <= 0:
            self._write({"name": "the profile is full", "ph": "i", "s": "p", "ts": events[-1]["ts"]})

    def _write(self, *events: dict[str, Any]) -> None:
        """Write a line with these events."""
        if self._file.closed:
            return
        line = b",".join(_encode({"pid": self._pid, "tid": self._pid, **event}) for event in events)
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            with suppress(OSError):  # the buffered rest cannot be written either
                self._file.close()
            self._warn_lost(error)

    def _warn_lost(self, error: OSError) -> None:
        _LOGGER.warning("this process's profile ends here: %s cannot be written: %s", self._file.name, error)


class Laps:
    """Repeated work of one thread, divided into named parts."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._began_s = self._last_s = 0.0

    def begin(self) -> None:
        """Start a repetition, and drop one that has not ended."""
        self._began_s = self._last_s = now_s()

    def lap(self, name: str) -> None:
        """End a part, which started at the end of the previous one."""
        now = now_s()
        self._timeline.slice(name, self._last_s, now)
        self._last_s = now

    def end(self, **args: Any) -> None:
        """End the repetition, with values for display."""
        self._timeline.slice(self._name, self._began_s, now_s(), **args)


_timeline: Timeline | None = None


def set_up(folder: Path | None, role: str) -> None:
    """Write this process's timeline into `folder`, if there is one. `role` is its name: `worker-0`."""
    global _timeline
    shut_down()
    if folder is not None:
        _timeline = Timeline(folder / f"{role}.{os.getpid()}", role)


def shut_down() -> None:
    """Close this process's timeline."""
    global _timeline
    timeline, _timeline = _timeline, None
    if timeline is not None:
        timeline.close()


def recording() -> Timeline | None:
    """Return this process's timeline; None (the normal case) without a profile."""
    return _timeline


def laps(name: str) -> Laps | None:
    """Return the laps of work named `name`; None without a profile."""
    return Laps(_timeline, name) if _timeline is not None else None


def now_s() -> float:
    """Return the machine's monotonic clock, equal in all its processes (and to `time.perf_counter`)."""
    return time.monotonic()


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
