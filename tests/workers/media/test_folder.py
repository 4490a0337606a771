"""A process's folder of temporary files goes with it, or with the next process after a kill."""

import fcntl
from pathlib import Path

import pytest

from workers.media.folder import own_folder


def test_the_folder_goes_with_its_process(tmp_path: Path) -> None:
    with own_folder(tmp_path) as folder:
        (folder / "copy").write_bytes(b"x")
        assert folder.stat().st_mode & 0o77 == 0
    assert [*tmp_path.iterdir()] == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / "dalsegno-media-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "copy").write_bytes(b"x")
    other = tmp_path / "dalsegno-media-without-lock"
    other.mkdir()

    with own_folder(tmp_path) as first, own_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first, second, other}


def test_a_folder_that_another_process_takes_for_abandoned_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process starts between the making of the lock and its locking."""
    flock, others = fcntl.flock, [own_folder]

    def late_flock(lock: int, operation: int) -> None:
        if others:
            with others.pop()(tmp_path):
                pass
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with own_folder(tmp_path) as folder:
        assert [*tmp_path.iterdir()] == [folder]
        assert (folder / "lock").exists()
