"""The contract of the media store, in memory."""

import time

import pytest

from shared.media.addresses import owner_token
from shared.media.memory import MemoryMediaStore, MemoryPieces
from tests.shared.media.contract import MediaStoreContract


class InMemory:
    """A store in memory, whose media a test makes older."""

    limit_s = 1000.0

    def __init__(self) -> None:
        self._ahead_ns = 0
        self.pieces = MemoryPieces(max_age_ns=int(self.limit_s * 1e9), clock=self._now_ns)

    def _now_ns(self) -> int:
        return time.time_ns() + self._ahead_ns

    async def open(self) -> MemoryMediaStore:
        return MemoryMediaStore(self.pieces)

    async def age(self, seconds: float) -> None:
        self._ahead_ns += int(seconds * 1e9)

    async def expire(self) -> None:
        await self.age(self.limit_s)

    async def fill(self) -> None:
        self.pieces.max_bytes = self.pieces.stored_bytes + 1000

    async def overwrite(self, tenant: str | None, digest: str, number: int, data: bytes) -> None:
        await self.pieces.put(owner_token(tenant), digest, number, data)

    async def stored_bytes(self) -> int:
        return self.pieces.stored_bytes


@pytest.fixture
def deployment() -> InMemory:
    return InMemory()


class TestMemoryMediaStore(MediaStoreContract):
    """The contract's tests."""
