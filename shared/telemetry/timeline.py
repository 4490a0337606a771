"""A timeline: what a process did and when, for who looks at all of them at once. Nothing unless asked for.

    step      | schedule | build |      forward      | sample |    a thread's work: one behind the other
    publish   |------------------|                                 what is on its way: many at a time
    deliver            |--------------|

As with `shared.telemetry.tracing` there is one per process, which a role's entry sets up. A trace tells of
one request
and is for a collector; a timeline has everything, and is for a file: `dalsegno serve --profile FILE`. Each
process writes a part of its own in Chrome's trace event format, which Perfetto reads: a line has an event, or
two with a comma between that make no sense without one another, for a process may be killed in any line. The
launcher joins the parts (`dalsegno.serve.profile`). Their clock is the machine's, so that they fit together.

Times are whole microseconds. Perfetto drops a slice that overlaps another of its thread, were it by a
nanosecond, and a fraction of a microsecond is lost in a float once a machine has been up for some months.

Off, it costs a comparison: who has something to tell keeps what `recording` gave when it was made.
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
"""Of a process: some 150 MB. A step writes five, an event on its way two."""

_encode: Final = msgspec.json.Encoder().encode


class Timeline:
    """One process's part, written to a file as it comes. From any thread; times are those of `now_s`.

    Where it cannot be written any more (the disk is full) it ends, and is said to: what is told of goes on.
    """

    def __init__(self, file: Path, role: str, *, max_events: int = MAX_EVENTS) -> None:
        self._file: Final = file.open("wb")
        self._pid: Final = os.getpid()
        self._left = max_events
        self._numbers: Final = count()
        self._threads: set[int] = set()
        self._began_s: Final = now_s()
        self._behind_s: Final = time.time() - now_s()
        self._write({"name": "process_name", "ph": "M", "args": {"name": role}})

    def slice(self, name: str, since_s: float, until_s: float, **told: Any) -> None:
        """Something this thread did. Slices of a thread are nested, or one behind the other."""
        since = _us(since_s)
        self._events(
            {
                "name": name,
                "cat": "work",
                "tid": self._thread(),
                "ph": "X",
                "ts": since,
                "dur": _us(until_s) - since,
                "args": told,
            }
        )

    def stretch(self, name: str, kind: str, since_s: float, until_s: float, **told: Any) -> None:
        """Something that went on beside others of its kind."""
        # Local: by an id for all processes Perfetto would have it beside them, and of none.
        number = {"local": str(next(self._numbers))}
        called = {"name": name, "cat": kind, "tid": self._thread(), "id2": number}
        self._events(
            {**called, "ph": "b", "ts": _us(since_s), "args": told},
            {**called, "ph": "e", "ts": _us(until_s)},
        )

    def hop(self, name: str, subject: str, seq: int, since_s: float, until_s: float) -> None:
        """An event's way to the log, or from it, under the position it has there."""
        kind, _, of = subject.partition(".")[2].partition(".")
        self.stretch(f"{name} {kind}", "log", since_s, until_s, seq=seq, of=of)

    def delivered(self, subject: str, seq: int, stored_ns: int) -> None:
        """An event is read now that was stored then, by the log's clock; nothing, if that was before this."""
        stored_s = stored_ns / 1e9 - self._behind_s
        if stored_s >= self._began_s:
            now = now_s()
            self.hop("deliver", subject, seq, min(stored_s, now), now)

    def close(self) -> None:
        """Write what is held back. Nothing is taken any more."""
        try:
            self._file.close()
        except OSError as error:
            self._say_lost(error)

    def _thread(self) -> int:
        """This thread's number; told of at its first event."""
        number = threading.get_native_id()
        if number not in self._threads:
            self._threads.add(number)
            name = threading.current_thread().name
            self._write({"name": "thread_name", "ph": "M", "tid": number, "args": {"name": name}})
        return number

    def _events(self, *events: dict[str, Any]) -> None:
        """All of them or none: what began also ends."""
        if self._left <= 0:
            return
        self._left -= len(events)
        self._write(*events)
        if self._left <= 0:
            self._write({"name": "the profile is full", "ph": "i", "s": "p", "ts": events[-1]["ts"]})

    def _write(self, *events: dict[str, Any]) -> None:
        """A line with these events."""
        if self._file.closed:
            return
        line = b",".join(_encode({"pid": self._pid, "tid": self._pid, **event}) for event in events)
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            with suppress(OSError):  # what is held back cannot be written either
                self._file.close()
            self._say_lost(error)

    def _say_lost(self, error: OSError) -> None:
        _LOGGER.warning("this process's profile ends here: %s cannot be written: %s", self._file.name, error)


class Laps:
    """A piece of work that is done over and over by one thread, and the parts it has."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._began_s = self._last_s = 0.0

    def begin(self) -> None:
        """It begins; what was begun and is not ended is forgotten."""
        self._began_s = self._last_s = now_s()

    def lap(self, name: str) -> None:
        """What was done since the part before is called so."""
        now = now_s()
        self._timeline.slice(name, self._last_s, now)
        self._last_s = now

    def end(self, **told: Any) -> None:
        """It is done, and what there is to tell of it."""
        self._timeline.slice(self._name, self._began_s, now_s(), **told)


_timeline: Timeline | None = None


def set_up(folder: Path | None, role: str) -> None:
    """Have this process write its part into `folder`, if there is one. `role` is its name: `worker-0`."""
    global _timeline
    shut_down()
    if folder is not None:
        _timeline = Timeline(folder / f"{role}.{os.getpid()}", role)


def shut_down() -> None:
    """Close this process's part."""
    global _timeline
    timeline, _timeline = _timeline, None
    if timeline is not None:
        timeline.close()


def recording() -> Timeline | None:
    """This process's timeline; None where there is none, which is nearly always."""
    return _timeline


def laps(name: str) -> Laps | None:
    """The laps of work that is called so; None where nobody records."""
    return Laps(_timeline, name) if _timeline is not None else None


def now_s() -> float:
    """The machine's clock, the same in all its processes; `time.perf_counter` is it too."""
    return time.monotonic()


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
