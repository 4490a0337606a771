"""The media store in memory: for tests, simulations, and execution in one process."""

import time
from collections import defaultdict
from collections.abc import Callable

from shared.media.pieced_store import PiecedMediaStore
from shared.media.pieces import HEAD, Stored
from shared.media.store import MediaStoreFullError, MediaStoreUnavailableError


class MemoryMediaStore(PiecedMediaStore):
    """A media store in memory.

    Attributes:
        memory: the pieces; further stores over them are further processes.
    """

    def __init__(self, memory: "MemoryPieces | None" = None) -> None:
        self.memory = memory or MemoryPieces()
        super().__init__(self.memory, self.memory.clock)


class MemoryPieces:
    """Pieces in memory (`shared.media.pieces.PieceStore`).

    Attributes:
        max_bytes: the maximum size of all pieces and heads; None: no limit.
        is_running: false: every operation fails.
    """

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        max_age_ns: int | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.max_bytes = max_bytes
        self.is_running = True
        self._max_age_ns = max_age_ns
        self.clock = clock
        self._media: defaultdict[tuple[str, str], dict[int | str, Stored]] = defaultdict(dict)

    @property
    def max_age_ns(self) -> int | None:
        return self._max_age_ns

    @property
    def stored_bytes(self) -> int:
        """The size of everything that is stored."""
        self._expire()
        return sum(len(part.data) for parts in self._media.values() for part in parts.values())

    async def put(self, owner: str, digest: str, part: int | str, data: bytes) -> None:
        self._check()
        parts = self._media[owner, digest]
        before = len(parts[part].data) if part in parts else 0
        if self.max_bytes is not None and self.stored_bytes - before + len(data) > self.max_bytes:
            raise MediaStoreFullError("the media store is full: try again when media have expired")
        parts[part] = Stored(data, self.clock())

    async def get(self, owner: str, digest: str, part: int | str) -> Stored | None:
        self._check()
        return self._media.get((owner, digest), {}).get(part)

    async def numbers(self, owner: str, digest: str) -> set[int]:
        self._check()
        return {part for part in self._media.get((owner, digest), {}) if isinstance(part, int)}

    async def digests(self, owner: str) -> set[str]:
        self._check()
        return {digest for (one, digest), parts in self._media.items() if one == owner and HEAD in parts}

    async def remove(self, owner: str, digest: str) -> bool:
        self._check()
        return bool(self._media.pop((owner, digest), None))

    async def close(self) -> None: ...

    def _check(self) -> None:
        if not self.is_running:
            raise MediaStoreUnavailableError("the media store does not answer")
        self._expire()

    def _expire(self) -> None:
        if self._max_age_ns is None:
            return
        first_ns = self.clock() - self._max_age_ns
        for key in [*self._media]:
            kept = {part: one for part, one in self._media[key].items() if one.time_ns > first_ns}
            self._media[key] = kept
            if not kept:
                del self._media[key]
