"""A process's folder of temporary files goes with it, or with the next process after a kill."""

from pathlib import Path

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
