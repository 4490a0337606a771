import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.telemetry import timeline
from shared.telemetry.timeline import Timeline
from tests.timelines import Stretch, read_events


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    timeline.shut_down()


def events_in(file: Path) -> list[dict[str, Any]]:
    return [event for line in file.read_text().splitlines() for event in json.loads(f"[{line}]")]


def stretches_in(folder: Path) -> list[Stretch]:
    """Return the process's timeline after it was closed."""
    timeline.shut_down()
    [file] = folder.iterdir()
    return read_events(events_in(file))


def test_without_a_folder_there_is_nothing_to_write_to() -> None:
    timeline.set_up(None, "gateway")

    assert timeline.recording() is None
    assert timeline.laps("step") is None


def test_a_part_is_named_by_its_process_and_tells_its_name(tmp_path: Path) -> None:
    timeline.set_up(tmp_path, "worker-3")
    timeline.shut_down()

    [file] = tmp_path.iterdir()
    assert file.name == f"worker-3.{os.getpid()}"
    [told] = events_in(file)
    assert (told["ph"], told["name"], told["args"]) == ("M", "process_name", {"name": "worker-3"})


def test_laps_lie_within_what_they_are_parts_of(tmp_path: Path) -> None:
    timeline.set_up(tmp_path, "worker-0")
    laps = timeline.laps("step")
    assert laps is not None
    laps.begin()  # and fails: nothing is told of it
    for rows in (1, 2):
        laps.begin()
        laps.lap("schedule")
        laps.lap("forward")
        laps.end(rows=rows)

    found = stretches_in(tmp_path)
    assert [one.name for one in found if one.name == "step"] == ["step", "step"]
    first, second = (one for one in found if one.name == "step")
    assert (first.told, second.told) == ({"rows": 1}, {"rows": 2})
    assert first.until_us <= second.since_us
    for name in ("schedule", "forward"):
        parts = [one for one in found if one.name == name]
        assert [first.since_us <= parts[0].since_us, parts[1].until_us <= second.until_us] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("days_up", [0, 60, 400])
def test_parts_lie_one_behind_the_other_however_long_the_machine_has_been_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days_up: int
) -> None:
    """Perfetto drops slices that overlap by a nanosecond, and a float of such times has no nanoseconds."""
    drawn, now_ns = random.Random(days_up), days_up * 86_400 * 10**9

    def now_s() -> float:
        nonlocal now_ns
        now_ns += drawn.randrange(40_000)
        return now_ns / 1e9

    monkeypatch.setattr(timeline, "now_s", now_s)
    timeline.set_up(tmp_path, "worker-0")
    laps = timeline.laps("step")
    assert laps is not None
    for _ in range(500):
        laps.begin()
        for name in ("schedule", "build", "forward", "sample"):
            laps.lap(name)
        laps.end()

    assert len(stretches_in(tmp_path)) == 2500  # and none overlaps another: the reader is strict


def test_each_thread_is_told_by_its_name(tmp_path: Path) -> None:
    timeline.set_up(tmp_path, "worker-0")
    recording = timeline.recording()
    assert recording is not None

    def work() -> None:
        recording.slice("work", 1.0, 2.0)
        recording.slice("work", 2.0, 3.0)

    engine = threading.Thread(target=work, name="engine")
    engine.start()
    engine.join()
    recording.slice("work", 1.5, 2.5)

    told = {(one.thread, one.since_us) for one in stretches_in(tmp_path)}
    assert told == {("engine", 1e6), ("engine", 2e6), (threading.current_thread().name, 1.5e6)}


def test_ways_to_the_log_may_overlap_and_say_whose_they_are(tmp_path: Path) -> None:
    timeline.set_up(tmp_path, "conductor")
    recording = timeline.recording()
    assert recording is not None
    recording.hop("publish", "ds.ready.0.r-1", 7, 1.0, 3.0)
    recording.hop("publish", "ds.ready.0.r-2", 8, 2.0, 4.0)

    assert stretches_in(tmp_path) == [
        Stretch("conductor", None, "publish ready", 1_000_000, 3_000_000, {"seq": 7, "of": "0.r-1"}),
        Stretch("conductor", None, "publish ready", 2_000_000, 4_000_000, {"seq": 8, "of": "0.r-2"}),
    ]


def test_a_delivery_begins_when_the_log_stored_the_event_on_the_same_clock(tmp_path: Path) -> None:
    timeline.set_up(tmp_path, "gateway")
    recording = timeline.recording()
    assert recording is not None
    before_s, stored_ns = timeline.now_s(), time.time_ns()
    recording.delivered("ds.walk.r-1", 5, stored_ns)
    after_s = timeline.now_s()

    [one] = stretches_in(tmp_path)
    assert (one.name, one.told) == ("deliver walk", {"seq": 5, "of": "r-1"})
    assert round(before_s * 1e6) <= one.until_us <= round(after_s * 1e6)
    assert abs(one.since_us / 1e6 - before_s) < 1.0, "wall clocks are set now and then, but not by years"


def test_what_the_log_held_before_is_no_delivery_and_what_it_holds_later_is_none_that_ends_before(
    tmp_path: Path,
) -> None:
    """The log's clock may be slightly ahead of ours."""
    timeline.set_up(tmp_path, "gateway")
    recording = timeline.recording()
    assert recording is not None
    recording.delivered("ds.walk.r-1", 1, time.time_ns() - 3600 * 10**9)
    recording.delivered("ds.walk.r-1", 2, time.time_ns() + 3600 * 10**9)

    [one] = stretches_in(tmp_path)
    assert (one.told["seq"], one.since_us) == (2, one.until_us)


def test_a_part_that_is_full_says_so_and_takes_no_more(tmp_path: Path) -> None:
    part = Timeline(tmp_path / "part", "worker-0", max_events=2)
    for second in range(3):
        part.slice("work", second, second + 1)
    part.close()

    told = [(event["ph"], event["name"]) for event in events_in(tmp_path / "part")]
    assert [one for one in told if one[0] != "M"] == [
        ("X", "work"), ("X", "work"), ("i", "the profile is full"),
    ]  # fmt: skip


def test_a_part_that_is_full_has_the_end_of_what_began(tmp_path: Path) -> None:
    part = Timeline(tmp_path / "part", "worker-0", max_events=1)
    part.hop("publish", "ds.ready.0.r-1", 7, 1.0, 3.0)
    part.hop("publish", "ds.ready.0.r-2", 8, 2.0, 4.0)
    part.close()

    *events, full = events_in(tmp_path / "part")
    assert [one.told["seq"] for one in read_events(events)] == [7]
    assert (full["name"], full["ts"]) == ("the profile is full", 3_000_000)


def test_a_full_disk_ends_the_profile_and_not_the_work_it_tells_of(caplog: pytest.LogCaptureFixture) -> None:
    part = Timeline(Path("/dev/full"), "worker-0")
    for second in range(1000):  # more than is held back
        part.slice("work", second, second + 1)
    part.close()

    [said] = caplog.messages
    assert said.startswith("this process's profile ends here: /dev/full cannot be written: ")


def test_what_a_full_disk_does_not_take_at_the_end_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    Timeline(Path("/dev/full"), "worker-0").close()

    assert len(caplog.messages) == 1


def test_what_a_thread_does_behind_the_end_is_not_told(tmp_path: Path) -> None:
    timeline.set_up(tmp_path, "worker-0")
    recording = timeline.recording()
    assert recording is not None
    timeline.shut_down()
    recording.slice("work", 1.0, 2.0)

    assert stretches_in(tmp_path) == []


@pytest.mark.processes
def test_processes_of_a_machine_share_the_clock() -> None:
    asked = [sys.executable, "-c", "from shared.telemetry import timeline; print(timeline.now_s())"]
    before_s = timeline.now_s()
    theirs_s = float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)

    assert before_s <= theirs_s <= timeline.now_s()
