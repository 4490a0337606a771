"""Digests of checkpoint files: of the bytes that were loaded, and computed once per version of a file."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from blake3 import blake3

from models.checkpoints import digests
from models.checkpoints.digests import (
    CheckpointReplacedError,
    DigestCache,
    DigestsCancelledError,
    OpenedFiles,
    combined_digest,
)

LONG_AGO = 1_600_000_000


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is big enough for the cache, changed long enough ago, and read in several pieces."""
    monkeypatch.setattr(digests, "CACHED_FROM_BYTES", 0)
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    monkeypatch.setattr(digests, "_READ_BYTES", 10)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the weights of a model")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, and not found in the cache."""
    found: list[Path] = []
    read = OpenedFiles._read

    def noted(self: OpenedFiles, path: Path, *args: object) -> str:
        found.append(path)
        return read(self, path, *args)  # type: ignore[arg-type] # passed on

    monkeypatch.setattr(OpenedFiles, "_read", noted)
    return found


def digest(path: Path, cache: DigestCache) -> str:
    opened = OpenedFiles.open([path], cache)
    try:
        found = opened.digests()
        opened.check()
        return found[path]
    finally:
        opened.close()


def test_a_digest_is_of_the_content(file: Path, cache: DigestCache) -> None:
    assert digest(file, cache) == blake3(file.read_bytes()).hexdigest()


def test_an_empty_file_has_a_digest(tmp_path: Path, cache: DigestCache) -> None:
    (tmp_path / "empty").touch()
    assert digest(tmp_path / "empty", cache) == blake3(b"").hexdigest()


def test_a_file_is_read_once(file: Path, cache: DigestCache, reads: list[Path]) -> None:
    assert digest(file, cache) == digest(file, cache)
    assert reads == [file]


def touched(file: Path) -> None:
    os.utime(file, (LONG_AGO, LONG_AGO))


def replaced_with_the_same_times(file: Path) -> None:
    status, other = file.stat(), file.with_suffix(".other")
    other.write_bytes(b"THE WEIGHTS OF A MODEL")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)


def written_in_place_with_the_same_times(file: Path) -> None:
    status = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"THE")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change", [touched, replaced_with_the_same_times, written_in_place_with_the_same_times]
)
def test_a_changed_file_is_read_again(
    change: Callable[[Path], None], file: Path, cache: DigestCache, reads: list[Path]
) -> None:
    digest(file, cache)
    change(file)
    assert digest(file, cache) == blake3(file.read_bytes()).hexdigest()
    assert len(reads) == 2


def test_a_file_that_was_changed_just_now_is_not_cached(
    file: Path, cache: DigestCache, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the same step of the file system's clock would not be seen."""
    monkeypatch.setattr(digests, "_SETTLED_NS", 3600 * 10**9)
    digest(file, cache)
    digest(file, cache)
    assert len(reads) == 2


def entry_of(tmp_path: Path) -> Path:
    [entry] = (tmp_path / "cache").glob("*.json")
    return entry


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"path": "x", "version": 3, "digest": "z"}'])
def test_a_malformed_cache_is_computed_again(
    content: bytes, file: Path, cache: DigestCache, tmp_path: Path
) -> None:
    expected = digest(file, cache)
    entry_of(tmp_path).write_bytes(content)
    assert digest(file, cache) == expected
    assert expected.encode() in entry_of(tmp_path).read_bytes()


def test_an_entry_that_others_can_write_is_not_believed(
    file: Path, cache: DigestCache, tmp_path: Path
) -> None:
    expected = digest(file, cache)
    entry = entry_of(tmp_path)
    entry.write_bytes(entry.read_bytes().replace(expected.encode(), b"0" * 64))
    assert digest(file, cache) == "0" * 64  # our own entry is
    entry.chmod(0o666)
    assert digest(file, cache) == expected


def test_no_cache_is_needed(file: Path, tmp_path: Path) -> None:
    expected = blake3(file.read_bytes()).hexdigest()
    (tmp_path / "taken").write_text("a file, and no folder")
    assert digest(file, DigestCache(None)) == digest(file, DigestCache(tmp_path / "taken")) == expected


def test_the_cache_is_private(file: Path, cache: DigestCache, tmp_path: Path) -> None:
    digest(file, cache)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_processes_that_start_together_read_a_file_once(
    file: Path, cache: DigestCache, reads: list[Path]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: digest(file, cache), range(8)))
    assert len(found) == len(reads) == 1


@pytest.mark.parametrize(
    "change",
    [touched, replaced_with_the_same_times, written_in_place_with_the_same_times, Path.unlink],
)
def test_a_file_that_changes_during_the_load_is_named(
    change: Callable[[Path], None], file: Path, cache: DigestCache
) -> None:
    """Before or after it is digested: the loader may have opened either."""
    for after in (False, True):
        file.write_bytes(b"the weights of a model")
        opened = OpenedFiles.open([file], cache)
        try:
            if after:
                opened.digests()
            change(file)
            with pytest.raises(CheckpointReplacedError, match=r"model\.safetensors was replaced"):
                loaded(opened)
        finally:
            opened.close()


def loaded(opened: OpenedFiles) -> None:
    opened.digests()
    opened.check()


def test_a_file_that_appears_during_the_load_is_named(tmp_path: Path, cache: DigestCache) -> None:
    opened = OpenedFiles.open([tmp_path / "chat_template.jinja"], cache)
    assert opened.digests() == {}
    opened.check()
    (tmp_path / "chat_template.jinja").touch()
    with pytest.raises(CheckpointReplacedError, match=r"chat_template\.jinja"):
        opened.check()


def test_a_write_into_a_served_file_is_named(file: Path, cache: DigestCache) -> None:
    opened = OpenedFiles.open([file], cache)
    loaded(opened)
    opened.check_unwritten([file])
    with file.open("r+b") as written:
        written.write(b"THE")
    with pytest.raises(
        CheckpointReplacedError, match=r"model\.safetensors was written to while it was served"
    ):
        opened.check_unwritten([file])
    opened.close()


def test_a_served_file_may_be_replaced(file: Path, cache: DigestCache) -> None:
    """The opened one keeps its content."""
    opened = OpenedFiles.open([file], cache)
    loaded(opened)
    replaced_with_the_same_times(file)
    opened.check_unwritten([file])
    file.unlink()
    opened.check_unwritten([file])
    opened.close()
    opened.close()


def test_a_digest_of_a_file_that_shrinks_is_refused(file: Path, cache: DigestCache) -> None:
    opened = OpenedFiles.open([file], cache)
    os.truncate(file, 3)
    with pytest.raises(CheckpointReplacedError):
        opened.digests()
    opened.close()


def test_a_cancelled_computation_ends(file: Path, cache: DigestCache) -> None:
    opened = OpenedFiles.open([file], cache)
    opened.cancel()
    with pytest.raises(DigestsCancelledError):
        opened.digests()
    opened.close()


def test_a_cancelled_computation_waits_for_no_other_process(file: Path, cache: DigestCache) -> None:
    opened, held = OpenedFiles.open([file], cache), cache.computing(file.resolve(), Event())
    with held, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(opened.digests)
        opened.cancel()
        with pytest.raises(DigestsCancelledError):
            waiting.result(timeout=60)
    opened.close()


def test_a_combined_digest_depends_on_names_and_digests_but_not_on_their_order() -> None:
    one = combined_digest({"a": "1", "b": "2"})
    assert combined_digest({"b": "2", "a": "1"}) == one
    assert len({one, combined_digest({"a": "2", "b": "1"}), combined_digest({"a": "1"})}) == 3
