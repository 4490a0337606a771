import json
import stat
from pathlib import Path

import pytest

from dalsegno.serve.profile import ProfileError, profiled
from shared.telemetry.timeline import Timeline
from tests.timelines import read


def write_part(folder: Path, role: str) -> None:
    part = Timeline(folder / f"{role}.1", role)
    part.slice(f"work of {role}", 1.0, 2.0)
    part.close()


def test_parts_of_all_processes_are_joined_at_the_end(tmp_path: Path) -> None:
    with profiled(tmp_path / "profile.json") as parts:
        assert parts is not None
        write_part(parts, "worker-0")
        events = (parts / "worker-0.1").read_text()
        (parts / "gateway.2").write_text(events.replace("worker-0", "gateway").replace('"pid":', '"pid":1'))

    found = {(one.process, one.name) for one in read(tmp_path / "profile.json")}
    assert found == {("worker-0", "work of worker-0"), ("gateway", "work of gateway")}
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_half_a_line_of_a_process_that_was_killed_is_left_out(tmp_path: Path) -> None:
    with profiled(tmp_path / "profile.json") as parts:
        assert parts is not None
        write_part(parts, "worker-0")
        with (parts / "worker-0.1").open("a") as file:
            file.write('{"pid":1,"na')

    assert len(read(tmp_path / "profile.json")) == 1


@pytest.mark.slow
def test_what_was_under_way_in_a_process_that_was_killed_is_told_whole_or_not_at_all(tmp_path: Path) -> None:
    part = Timeline(tmp_path / "worker-0.1", "worker-0")
    for number in range(3):
        part.interval("publish output", "log", number, number + 1.0, seq=number)
    part.close()
    written, told = (tmp_path / "worker-0.1").read_bytes(), set()
    for length in range(len(written)):
        with profiled(tmp_path / "profile.json") as parts:
            assert parts is not None
            (parts / "worker-0.1").write_bytes(written[:length])
        told.add(len(read(tmp_path / "profile.json")))

    assert told == {0, 1, 2}


def test_a_deployment_that_failed_leaves_its_profile_too(tmp_path: Path) -> None:
    def fail() -> None:
        with profiled(tmp_path / "profile.json") as parts:
            assert parts is not None
            write_part(parts, "worker-0")
            raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        fail()
    assert len(read(tmp_path / "profile.json")) == 1


def test_what_a_launcher_that_was_killed_left_is_not_in_the_next_profile(tmp_path: Path) -> None:
    left = tmp_path / "profile.json.parts"
    left.mkdir()
    write_part(left, "worker-0")

    with profiled(tmp_path / "profile.json"):
        pass

    assert json.loads((tmp_path / "profile.json").read_text())["traceEvents"] == []


def test_a_folder_with_somebody_elses_files_is_left_as_it_is(tmp_path: Path) -> None:
    theirs = tmp_path / "car.parts" / "engine.txt"
    theirs.parent.mkdir()
    theirs.write_text("four cylinders")
    write_part(theirs.parent, "worker-0")

    with (
        pytest.raises(ProfileError, match=r"car\.parts is for parts of a profile, and contains engine\.txt"),
        profiled(tmp_path / "car"),
    ):
        pytest.fail("nothing is started")

    assert theirs.read_text() == "four cylinders"
    assert len(list(theirs.parent.iterdir())) == 2


def test_without_a_file_there_is_no_folder() -> None:
    with profiled(None) as parts:
        assert parts is None


def test_a_file_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "profile.json"

    with (
        pytest.raises(ProfileError, match=r"--profile: cannot write .*nowhere.*: No such"),
        profiled(nowhere),
    ):
        pytest.fail("nothing is started")


def test_an_error_of_the_deployments_own_is_not_the_files(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), profiled(tmp_path / "profile.json"):
        raise PermissionError(stat.S_IRUSR, "not ours")
