"""The stream guard recreates a lost stream, fits the limit to the disk, and restarts a stopped server."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dalsegno.serve import stream_guard
from dalsegno.serve.stream_guard import Disk, StreamGuard, byte_limit, default_byte_limit
from shared.log.capacity import Capacity, capacity_of
from shared.log.capacity_watch import CapacityWatch
from shared.log.nats.durability import StreamPolicy
from shared.log.nats.jetstream import connect
from shared.log.nats.private_server import NatsServer
from shared.log.nats.provisioning import Provisioner
from shared.log.port import LogFullError, LogRegressedError, LogUnavailableError
from shared.subjects import Subjects
from tests.shared.log.admin import delete_stream

GIB = 1 << 30
MIB = 1 << 20

# ---- the byte_limit --------------------------------------------------------------------------------------


def test_the_bound_is_three_quarters_of_what_the_disk_leaves_for_the_log() -> None:
    assert default_byte_limit(0, Disk(total=100 * GIB, free=80 * GIB)) == 60 * GIB
    assert default_byte_limit(20 * GIB, Disk(total=100 * GIB, free=60 * GIB)) == 60 * GIB


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (80 * GIB, 60 * GIB),
        (51 * GIB, 60 * GIB),
        (40 * GIB, 50 * GIB - 256 * MIB),  # others have taken it
        (256 * MIB, 10 * GIB),  # the margin is all that is left
        (0, 10 * GIB - 256 * MIB),
    ],
)
def test_it_comes_down_to_what_others_leave(free: int, expected: int) -> None:
    assert byte_limit(10 * GIB, Disk(total=100 * GIB, free=free), 60 * GIB) == expected


def test_a_log_without_any_room_is_not_one_without_a_bound() -> None:
    assert byte_limit(0, Disk(total=GIB, free=0), GIB) == 1


# ---- on a real server -------------------------------------------------------------------------------


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


class Kept:
    """A stream guard on one server, and the texts that it reported."""

    def __init__(self, server: NatsServer, subjects: Subjects, keeping: StreamPolicy | None = None) -> None:
        self.said: list[str] = []
        self.restarts = 0
        self.connected_again = asyncio.Event()
        self.provisioner = Provisioner(server.url, subjects, self._on_connected)
        self.guard = StreamGuard(
            self.provisioner,
            keeping or StreamPolicy(),
            lambda text, _: self.said.append(text),
            folder=server.log_file.parent,
            failed_write=lambda: server.failed_write,
            restart=self._restart,
        )
        self._server = server

    async def _on_connected(self) -> None:
        self.connected_again.set()

    def _restart(self) -> None:
        self.restarts += 1
        self._server.kill()
        self._server.start()

    async def look(self) -> int | None:
        """Let it look, and return the byte_limit that the log has then."""
        await self.guard.check()
        state = await self.provisioner.state()
        assert state is not None
        return state.max_bytes


@pytest.fixture
async def keep(server: NatsServer, subjects: Subjects) -> AsyncIterator[Callable[..., Kept]]:
    opened: list[Kept] = []

    def keep(keeping: StreamPolicy | None = None) -> Kept:
        opened.append(Kept(server, subjects, keeping))
        return opened[-1]

    yield keep
    for kept in opened:
        await kept.provisioner.close()


@pytest.mark.processes
async def test_a_stream_that_is_lost_is_made_again_and_nobody_takes_it_for_the_old_one(
    server: NatsServer, subjects: Subjects, keep: Callable[..., Kept]
) -> None:
    kept = keep()
    await kept.provisioner.open(server.credentials, timeout_s=5)
    await kept.look()
    log = await connect(server.url, credentials=server.credentials, subjects=subjects, name="role")
    await log.publish(subjects.walk("r"), b"1")
    kept.said.clear()
    await delete_stream(server, subjects.stream)
    await kept.look()
    assert kept.said == ["the log has lost its stream: it is created again; everything it held is gone"]
    with pytest.raises(LogRegressedError, match="recreated"):
        async for _ in log.read([subjects.walk("r")], 1):
            pass
    await log.close()


@pytest.mark.processes
async def test_the_bound_follows_the_disk_and_nothing_is_deleted(
    server: NatsServer, subjects: Subjects, keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(total=GIB, free=GIB)
    monkeypatch.setattr(stream_guard, "disk_of", lambda _: disk)
    kept = keep()
    await kept.provisioner.open(server.credentials, timeout_s=5)
    bounds = [await kept.look()]
    log = await connect(server.url, credentials=server.credentials, subjects=subjects, name="role")
    for _ in range(20):
        await log.publish(subjects.walk("r"), bytes(100_000))
    rooms = []
    for free in (GIB, 300 * MIB, 52 * MIB, 0, GIB):
        disk = Disk(total=GIB, free=free)
        bounds.append(await kept.look())
        rooms.append(capacity_of(await log.state(), refuses=False))
    stored = (await log.state()).bytes
    margin = Disk(total=GIB, free=0).margin
    assert bounds[:3] == [round(0.75 * GIB), round(0.75 * GIB), stored + 300 * MIB - margin]
    assert bounds[4:] == [1, round(0.75 * GIB)]  # 2 MB are stored, and the margin is 51 MiB
    assert rooms == [Capacity.FREE, Capacity.FREE, Capacity.NEARLY_FULL, Capacity.FULL, Capacity.FREE]
    assert (await log.state()).messages == 20
    await log.close()


@pytest.mark.processes
async def test_a_bound_that_was_told_is_kept_while_the_disk_allows_it(
    server: NatsServer, keep: Callable[..., Kept]
) -> None:
    kept = keep(StreamPolicy(max_bytes=5 * MIB))
    await kept.provisioner.open(server.credentials, timeout_s=5)
    assert await kept.look() == 5 * MIB


@pytest.mark.processes
async def test_the_bound_of_media_is_half_of_the_logs_and_follows_the_disk(
    server: NatsServer, keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(total=GIB, free=GIB)
    monkeypatch.setattr(stream_guard, "disk_of", lambda _: disk)
    kept = keep()
    await kept.provisioner.open(server.credentials, timeout_s=5)
    bounds = []
    for free in (GIB, 300 * MIB, 0, GIB):
        disk = Disk(total=GIB, free=free)
        await kept.look()
        media = await kept.provisioner.media_state()
        assert media is not None
        bounds.append(media.max_bytes)
    left = 300 * MIB - Disk(total=GIB, free=0).margin
    assert bounds == [round(0.75 * GIB) // 2, left, 1, round(0.75 * GIB) // 2]


@pytest.mark.processes
async def test_a_lost_stream_of_media_is_made_again_and_the_log_stays(
    server: NatsServer, subjects: Subjects, keep: Callable[..., Kept]
) -> None:
    kept = keep()
    await kept.provisioner.open(server.credentials, timeout_s=5)
    await kept.look()
    before = await kept.provisioner.state()
    await delete_stream(server, subjects.media_stream)
    kept.said.clear()
    await kept.look()
    assert kept.said == ["the stream of media is lost: it is created again, without the media"]
    after = await kept.provisioner.state()
    assert before is not None
    assert after is not None
    assert after.created_ns == before.created_ns


# ---- on a real disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a file system of the test's own takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.processes
async def test_a_disk_that_others_fill_up_stops_the_log_until_there_is_room(
    small_disk: Path, subjects: Subjects
) -> None:
    server = NatsServer(small_disk / "nats")
    server.start()
    kept = Kept(server, subjects)
    await kept.provisioner.open(server.credentials, timeout_s=5)
    await kept.look()
    log = await connect(server.url, credentials=server.credentials, subjects=subjects, name="role")
    await log.publish(subjects.walk("r"), b"before")

    ballast = small_disk / "ballast"
    _fill(ballast)
    log.post(subjects.walk("r"), bytes(500_000))  # before anybody has looked: the write fails
    while not server.failed_write:  # noqa: ASYNC110 - another process's doing
        await asyncio.sleep(0.01)
    with suppress(LogUnavailableError):  # a byte_limit cannot even be written down
        await kept.guard.check()
    watch = CapacityWatch(log)
    await watch.poll()
    while not watch.reason:  # noqa: ASYNC110 - time is what is waited for
        await asyncio.sleep(0.05)
    with pytest.raises((LogUnavailableError, LogFullError)):
        watch.require_capacity()
    log.post(subjects.walk("r"), b"meanwhile")
    ballast.unlink()
    await kept.guard.check()
    await log.drain()
    await kept.connected_again.wait()
    await kept.look()
    await watch.poll()

    assert "no space left on device" in kept.said[-2]
    assert kept.said[-1] == "the log's disk has space again: its server is restarted"
    assert kept.restarts == 1
    found = [record.data async for record in log.history([subjects.walk("r")])]
    assert {found[0], *found[1:]} == {b"before", bytes(500_000), b"meanwhile"}
    watch.require_capacity()
    await log.close()
    await kept.provisioner.close()
    server.stop()


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 16))
        except OSError:
            return
