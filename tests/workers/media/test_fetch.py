"""Local copies of media: verified, bounded, shared by requests, and apart by tenant."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from shared.errors import DalSegnoError
from shared.events import Media
from shared.media.addresses import owner_token
from shared.media.memory import MemoryMediaStore, MemoryPieces
from shared.media.store import MediaCorruptError, MediaGoneError, MediaTooLargeError, gone
from workers.media.fetch import LocalMedia

KIB = 1024


class CountedPieces(MemoryPieces):
    """Pieces in memory, whose reads are counted and can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def get(self, owner: str, digest: str, part: int | str) -> object:  # type: ignore[override]
        self.reads += isinstance(part, int)
        self.asked.set()
        await self.go.wait()
        return await super().get(owner, digest, part)


class World:
    """A store with media, and the local copies of one worker."""

    def __init__(self, folder: Path) -> None:
        self.pieces = CountedPieces()
        self.store = MemoryMediaStore(self.pieces)
        self.folder = folder
        self.local = LocalMedia(self.store, folder, max_bytes=10 * KIB, max_file_bytes=8 * KIB)

    async def put(self, data: bytes, tenant: str | None = None, name: str | None = None) -> Media:
        stored = await self.store.put(data, tenant=tenant, content_type="image/png")
        return Media(modality="image", digest=stored.digest, size=stored.size, name=name)

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_held_medium_is_a_verified_file(world: World) -> None:
    medium = await world.put(b"pixels")
    with pytest.raises(MediaGoneError):
        world.local.path_of(medium)
    async with world.local.held([medium, medium], None):
        assert world.local.path_of(medium).read_bytes() == b"pixels"
    assert world.files() == {medium.digest}


async def test_a_copy_serves_later_and_concurrent_requests(world: World) -> None:
    medium = await world.put(b"pixels")
    world.pieces.go.clear()
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        held = [
            tasks.create_task(stack.enter_async_context(world.local.held([medium], None))) for _ in range(3)
        ]
        world.pieces.go.set()
        await asyncio.wait(held)
    async with world.local.held([medium], None):
        assert world.pieces.reads == 1


async def test_a_copy_is_for_tenants_that_have_the_medium(world: World) -> None:
    medium = await world.put(b"pixels", tenant="blue")
    async with world.local.held([medium], "blue"):
        for tenant in (None, "red"):
            with pytest.raises(MediaGoneError) as told:
                async with world.local.held([medium], tenant):
                    pass
            assert told.value.message == f"files[0]: {gone(medium.digest).message}"
        await world.put(b"pixels", tenant="red")
        async with world.local.held([medium], "red"):
            assert world.pieces.reads == 1


async def test_errors_name_the_file(world: World) -> None:
    there = await world.put(b"pixels")
    gone = Media(modality="image", digest="0" * 64, size=6, name="cat.png")

    with pytest.raises(
        MediaGoneError, match=r"files\[1\] \('cat.png'\): the medium 0+ is not stored"
    ) as told:
        async with world.local.held([there, gone], None):
            pass
    assert (told.value.code, told.value.status) == ("media_gone", 410)
    assert world.files() == {there.digest}


@pytest.mark.parametrize(
    "wrong",
    [b"pixelS", b"pixe", b"pixels and more"],
    ids=["other bytes", "too few", "too many"],
)
async def test_other_bytes_than_the_digests_are_refused(world: World, wrong: bytes) -> None:
    medium = await world.put(b"pixels")
    await world.pieces.put(owner_token(None), medium.digest, 0, wrong)

    with pytest.raises(MediaCorruptError, match=r"files\[0\]"):
        async with world.local.held([medium], None):
            pass
    assert world.files() == set()


async def test_a_medium_of_another_size_than_the_event_says_is_refused(world: World) -> None:
    medium = await world.put(b"pixels")
    lie = msgspec.structs.replace(medium, size=5)
    with pytest.raises(MediaCorruptError):
        async with world.local.held([lie], None):
            pass
    async with world.local.held([medium], None):
        with pytest.raises(MediaCorruptError):
            async with world.local.held([lie], None):
                pass
        assert world.local.path_of(medium).read_bytes() == b"pixels"


async def test_copies_are_bounded_and_the_longest_unused_go_first(world: World) -> None:
    first, second, third = [await world.put(bytes([n]) * 4 * KIB) for n in range(3)]
    for medium in (first, second, first, third):
        async with world.local.held([medium], None):
            pass
    assert world.files() == {first.digest, third.digest}


async def test_a_request_waits_until_others_leave_it_room(world: World) -> None:
    first, second = [await world.put(bytes([n]) * 6 * KIB) for n in range(2)]
    ended = asyncio.Event()

    async def other() -> None:
        async with world.local.held([second], None):
            assert ended.is_set()
            assert world.files() == {second.digest}

    async with asyncio.TaskGroup() as tasks, world.local.held([first], None):
        waiting = tasks.create_task(other())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert world.local.path_of(first).stat().st_size == 6 * KIB
        ended.set()


async def test_what_can_never_fit_is_refused_at_once(world: World) -> None:
    large = Media(modality="image", digest="0" * 64, size=8 * KIB + 1, name="big.png")
    half = [Media(modality="image", digest=str(n) * 64, size=6 * KIB) for n in range(2)]

    for media, message in (
        ([large], r"files\[0\] \('big.png'\): expected at most 8192 bytes \(media.max_bytes\), found 8193"),
        (half, r"at most 10240 bytes in all files of a request \(media.cache_bytes\), found 12288"),
    ):
        with pytest.raises(MediaTooLargeError, match=message):
            async with world.local.held(media, None):
                pass
    assert world.pieces.reads == 0


async def test_a_folder_that_cannot_be_written_is_said(world: World) -> None:
    medium = await world.put(b"pixels")
    world.folder.rmdir()
    with pytest.raises(DalSegnoError, match=r"files\[0\]: the local copy cannot be written"):
        async with world.local.held([medium], None):
            pass


async def test_a_cancelled_request_leaves_nothing(world: World) -> None:
    medium = await world.put(b"pixels")
    world.pieces.go.clear()

    async def request() -> None:
        async with world.local.held([medium], None):
            pass

    world.pieces.asked.clear()
    cancelled = asyncio.create_task(request())
    await world.pieces.asked.wait()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    world.pieces.go.set()

    assert world.files() == set()
    async with world.local.held([medium], None):
        assert world.local.path_of(medium).read_bytes() == b"pixels"
