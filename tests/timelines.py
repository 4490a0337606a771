"""Strict parser of Chrome trace event files, by the format's description and Perfetto's behaviour.

Perfetto's trace processor (v55.3) is more lenient, except for two rules. It drops a slice that overlaps
another
slice of its thread, even by a nanosecond. And it assigns an asynchronous event to its process only by a local
id.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_FIELDS: Final[dict[str, dict[str, type]]] = {
    "M": {"name": str, "args": dict},
    "X": {"name": str, "cat": str, "ts": int, "dur": int, "args": dict},
    "b": {"name": str, "cat": str, "id2": dict, "ts": int, "args": dict},
    "e": {"name": str, "cat": str, "id2": dict, "ts": int},
    "i": {"name": str, "s": str, "ts": int},
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """A slice with a duration; `thread` is None for an asynchronous one."""

    process: str
    thread: str | None
    name: str
    since_us: int
    until_us: int
    told: dict[str, Any]


def read_events(events: list[dict[str, Any]]) -> list[Stretch]:
    """The events in the order of their begin; raises AssertionError for an invalid file."""
    processes, threads = dict[int, str](), dict[tuple[int, int], str]()
    for event in events:
        fields = {"ph": str, "pid": int, "tid": int, **_FIELDS[event["ph"]]}
        assert event.keys() == fields.keys(), event
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M":
            assert event["name"] == "thread_name"
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    found, begun, last = list[Stretch](), dict[tuple[int, str, str], Any](), defaultdict[Any, list[Any]](list)
    for event in events:
        key = (event["pid"], event.get("cat", ""), _local(event.get("id2", {"local": ""})))
        process = processes[event["pid"]]
        if event["ph"] == "X":
            thread = event["pid"], event["tid"]
            until = event["ts"] + event["dur"]
            last[thread].append((event["ts"], until))
            found.append(Stretch(process, threads[thread], event["name"], event["ts"], until, event["args"]))
        elif event["ph"] == "b":
            assert key not in begun, "an id tells stretches of a kind apart"
            begun[key] = event
        elif event["ph"] == "e":
            begin = begun.pop(key)
            found.append(Stretch(process, None, begin["name"], begin["ts"], event["ts"], begin["args"]))
    assert not begun, "what began has ended"
    assert all(one.since_us <= one.until_us for one in found)
    for slices in last.values():
        _check_nested(slices)
    return sorted(found, key=lambda one: (one.since_us, -one.until_us))


def read(file: Path) -> list[Stretch]:
    return read_events(json.loads(file.read_text())["traceEvents"])


def _local(identity: dict[str, Any]) -> str:
    assert identity.keys() == {"local"}, identity
    assert isinstance(identity["local"], str), identity
    return identity["local"]


def _check_nested(slices: list[tuple[int, int]]) -> None:
    """Check that two slices of a thread are nested or disjoint."""
    around: list[int] = []
    for since, until in sorted(slices, key=lambda one: (one[0], -one[1])):
        while around and around[-1] <= since:
            around.pop()
        assert not around or until <= around[-1], "slices of a thread overlap"
        around.append(until)
