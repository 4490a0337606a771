import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from workers.machine.read_ahead import read_ahead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks at open files in /proc")


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes of which file are read ahead."""
    found: Counter[str] = Counter()

    def advise(file: int, at: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(f"/proc/self/fd/{file}").readlink().name
        assert at == found[name], "piece by piece"
        found[name] += size

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def write(folder: Path, *names: str, size: int = 5_000_000) -> None:
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(size)


def test_all_of_the_weights_are_read_and_nothing_else(tmp_path: Path, advised: Counter[str]) -> None:
    write(tmp_path, "a.safetensors", "b.safetensors", "pytorch_model.bin")
    read_ahead(tmp_path, lambda: 10**9)

    assert advised.keys() == {"a.safetensors", "b.safetensors"}
    assert all(size >= 5_000_000 for size in advised.values())


def test_files_that_memory_has_no_room_for_are_left(tmp_path: Path, advised: Counter[str]) -> None:
    write(tmp_path, "a.safetensors", "b.safetensors")
    read_ahead(tmp_path, lambda: 19_000_000)

    assert advised.keys() == {"a.safetensors"}


def test_a_file_that_cannot_be_read_is_the_loaders_to_tell(tmp_path: Path, advised: Counter[str]) -> None:
    (tmp_path / "a.safetensors").mkdir()
    read_ahead(tmp_path, lambda: 10**9)
    read_ahead(tmp_path / "nowhere", lambda: 10**9)

    assert not advised
