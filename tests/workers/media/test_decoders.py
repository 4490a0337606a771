"""Decoder processes: what they give, what hostile files do to them, and what is left of it."""

import contextlib
import hashlib
import io
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.media.in_process import InProcessReader
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, VideoInfo
from shared.errors import CapacityError
from shared.events import Media
from tests.models.media import samples
from workers.media.decoders import Decoders
from workers.media.reader import DecodingReader

pytestmark = pytest.mark.processes

LIMITS = MediaLimits(max_pixels=1_000_000, max_frames=64, max_seconds=60.0, max_decoded_bytes=32 << 20)
ALL_FILES = {
    **{kind: samples.image(kind) for kind in samples.IMAGES},
    **{kind: samples.video(kind) for kind in samples.VIDEOS},
    **{kind: samples.audio(kind, seconds=0.1) for kind in samples.AUDIO},
}


class Folder:
    """Local copies of media, as a worker has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, bytes] = {}

    def add(self, data: bytes) -> Media:
        digest = hashlib.sha256(data).hexdigest()
        (self.path / digest).write_bytes(data)
        self.files[digest] = data
        return Media(modality="image", digest=digest, size=len(data))

    def path_of(self, medium: Media) -> Path:
        return self.path / medium.digest


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def make(folder: Folder) -> Iterator[Callable[..., tuple[DecodingReader, Decoders]]]:
    """Makes readers, and ends their processes."""
    with contextlib.ExitStack() as closing:

        def reader(
            count: int = 1, timeout_s: float = 20.0, **options: Any
        ) -> tuple[DecodingReader, Decoders]:
            limits = options.pop("limits", LIMITS)
            decoders = Decoders(count, timeout_s, limits, **options)
            closing.callback(decoders.close)
            return DecodingReader(decoders, folder.path_of), decoders

        yield reader


def first_and_last(info: VideoInfo) -> list[int]:
    return [0, 0, info.frames - 1]


def test_a_decoder_gives_the_arrays_of_the_same_code_in_process(make: Any, folder: Folder) -> None:
    reader, decoders = make()
    media = {kind: folder.add(data) for kind, data in ALL_FILES.items()}
    archive = folder.add(npz())
    expected = InProcessReader(folder.files)

    for kind in samples.IMAGES:
        assert np.array_equal(reader.image(media[kind]), expected.image(media[kind]))
    for kind in samples.VIDEOS:
        found, whole = (one.video(media[kind], choose=first_and_last) for one in (reader, expected))
        assert np.array_equal(found.frames, whole.frames)
        assert (found.info, found.indices, list(found.seconds)) == (
            whole.info,
            whole.indices,
            list(whole.seconds),
        )
    for kind in samples.AUDIO:
        assert np.array_equal(
            reader.audio(media[kind], rate=16_000), expected.audio(media[kind], rate=16_000)
        )
    assert np.array_equal(reader.tensors(archive)["state"], expected.tensors(archive)["state"])
    assert len(decoders.pids) == 1


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, state=np.arange(6).reshape(2, 3))
    return file.getvalue()


def test_a_decoder_imports_no_torch_and_holds_no_secret(make: Any, folder: Folder, monkeypatch: Any) -> None:
    monkeypatch.setenv("DALSEGNO_NATS_PASSWORD", "secret")
    reader, decoders = make()
    reader.image(folder.add(samples.image("PNG")))

    (pid,) = decoders.pids
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "/torch/" not in mapped
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")


@pytest.mark.parametrize(
    "data", [samples.png_header(50_000, 50_000), samples.gif_of_pixels(1_000_000), b"", b"<html></html>"]
)
def test_bombs_are_refused_and_the_decoder_goes_on(make: Any, folder: Folder, data: bytes) -> None:
    reader, decoders = make()
    picture = folder.add(samples.image("PNG"))
    reader.image(picture)
    before = decoders.pids

    medium = folder.add(data)
    with pytest.raises(MediaError) as error:
        reader.video(medium, choose=first_and_last)

    assert error.value.digest == medium.digest
    assert reader.image(picture).shape == (32, 48, 3)
    assert decoders.pids == before


def test_a_file_that_takes_too_much_memory_is_refused(make: Any, folder: Folder) -> None:
    limits = MediaLimits(max_pixels=100_000_000)
    reader, decoders = make(limits=limits, memory_bytes=48 << 20)
    picture = folder.add(samples.image("PNG"))
    reader.image(picture)

    bomb = folder.add(samples.image("PNG", np.zeros((6_000, 6_000), np.uint8), compress_level=1))
    with pytest.raises(MediaTooLargeError, match="memory"):
        reader.image(bomb)

    assert reader.image(picture).shape == (32, 48, 3)
    assert len(decoders.pids) == 1


def test_a_file_that_takes_too_long_is_refused_and_its_decoder_replaced(make: Any, folder: Folder) -> None:
    reader, decoders = make(timeout_s=1.0)
    picture = folder.add(samples.image("PNG"))
    reader.image(picture)
    (before,) = decoders.pids
    os.kill(before, signal.SIGSTOP)

    with pytest.raises(MediaTooLargeError, match="decode_timeout_s"):
        reader.image(picture)

    assert reader.image(picture).shape == (32, 48, 3)
    assert decoders.pids != [before]
    assert not Path(f"/proc/{before}").exists()


@pytest.mark.parametrize("data", [samples.video("mp4"), samples.image("PNG")])
def test_a_job_is_repeated_if_its_decoder_was_killed_from_outside(
    make: Any, folder: Folder, data: bytes
) -> None:
    reader, decoders = make()
    video = folder.add(data)
    reader.image(folder.add(samples.image("PNG")))
    (pid,) = decoders.pids
    killed: list[int] = []

    def kill_once(info: VideoInfo) -> list[int]:
        if not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return first_and_last(info)

    assert reader.video(video, choose=kill_once).frames.shape == (3, 32, 48, 3)
    assert killed == [pid]


def test_a_file_that_ends_a_new_decoder_is_refused(make: Any, folder: Folder) -> None:
    reader, decoders = make()

    def kill(info: VideoInfo) -> list[int]:
        os.kill(decoders.pids[0], signal.SIGKILL)
        return first_and_last(info)

    with pytest.raises(MediaError, match="process that decoded it has ended"):
        reader.video(folder.add(samples.video("mp4")), choose=kill)
    assert decoders.pids == []


def test_an_error_of_the_family_ends_the_decoder_under_way(make: Any, folder: Folder) -> None:
    reader, decoders = make()

    with pytest.raises(ValueError, match="indices"):
        reader.video(folder.add(samples.video("mp4")), choose=lambda info: [info.frames])

    assert decoders.pids == []


def test_threads_share_the_decoders(make: Any, folder: Folder) -> None:
    reader, decoders = make(count=2)
    media = [folder.add(samples.image("PNG", samples.picture(shift=n))) for n in range(8)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: reader.image(media[n])}), daemon=True)
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert all(np.array_equal(found[n], samples.picture(shift=n)) for n in range(8))
    assert len(decoders.pids) <= 2


def test_closing_ends_all_processes_and_refuses_further_jobs(make: Any, folder: Folder) -> None:
    reader, decoders = make()
    picture = folder.add(samples.image("PNG"))
    reader.image(picture)
    (pid,) = decoders.pids

    decoders.close()

    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(CapacityError):
        reader.image(picture)


def test_mutated_files_of_every_format_harm_nothing(make: Any, folder: Folder) -> None:
    """About four hundred files: bytes flipped, ranges removed or repeated, ends cut off."""
    reader, decoders = make(timeout_s=5.0)
    chance = random.Random(17)
    reader.image(folder.add(samples.image("PNG")))
    open_before = open_files()
    outcomes = {"decoded": 0, "refused": 0}

    for data in ALL_FILES.values():
        for _ in range(24):
            medium = folder.add(mutated(data, chance))
            read = chance.choice([reader.image, as_video(reader), as_audio(reader)])
            try:
                read(medium)
                outcomes["decoded"] += 1
            except MediaError:
                outcomes["refused"] += 1
            assert all(resident_bytes(pid) < 400 << 20 for pid in decoders.pids)

    assert outcomes["decoded"] > 10
    assert outcomes["refused"] > 100
    assert len(decoders.pids) <= 1
    assert open_files() <= open_before + 1


def mutated(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(found) or 1)
        match chance.randrange(5):
            case 0 | 1:
                found[at] = chance.randrange(256)
            case 2:
                found[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4)])
            case 3:
                del found[at : at + chance.randint(1, 64)]
            case _:
                found[at:at] = found[at : at + chance.randint(1, 64)]
    return bytes(found if chance.random() < 0.8 else found[: chance.randrange(len(found) or 1)])


def as_video(reader: DecodingReader) -> Callable[[Media], Any]:
    return lambda medium: reader.video(medium, choose=first_and_last)


def as_audio(reader: DecodingReader) -> Callable[[Media], Any]:
    return lambda medium: reader.audio(medium, rate=16_000)


def resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, IndexError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_worker_that_ends_blames_no_file(make: Any, folder: Folder) -> None:
    reader, decoders = make()

    def close(info: VideoInfo) -> list[int]:
        decoders.close()
        return first_and_last(info)

    with pytest.raises(CapacityError):
        reader.video(folder.add(samples.video("mp4")), choose=close)


def test_a_decoder_that_cannot_start_blames_no_file(
    make: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.media.decoders._COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    reader, decoders = make()

    with pytest.raises(CapacityError, match="could not be started"):
        reader.image(folder.add(samples.image("PNG")))
    assert decoders.pids == []
