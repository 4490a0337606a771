"""Digests of checkpoint files, computed while the files are loaded. No torch.

    open all files ──> load them ───────────────────────> check: is every path still the opened file?
                  └──> digest them, in other threads ──┘

The loader opens a path between the opening here and the check. If the path leads to the same, unmodified
file at both times (device, inode, size, and the times of its last writing and renaming), the loader has read
the bytes that were digested. So a file that is replaced or written to meanwhile is an error, and never a
digest of other bytes than those loaded.

A digest of a big file is kept in a cache, by the same properties of the file: then it is not read again. A
file that was changed within the last seconds is not cached, because a second change could leave its times as
they are (file systems count them in steps).
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Annotated, Final, Self

import msgspec
from blake3 import blake3
from msgspec import Meta

from shared.errors import WorkerError

CACHED_FROM_BYTES: Final = 16 << 20
"""Smaller files are digested faster than an entry of the cache is found."""
_READ_BYTES: Final = 16 << 20
"""Read at once. After each read the thread waits for its turn among the threads that import modules."""
_SETTLED_NS: Final = 2_000_000_000
"""The coarsest step in which a common file system counts times."""
_LOOK_AGAIN_S: Final = 0.05


class CheckpointReplacedError(WorkerError):
    """A file of the checkpoint changed while it was loaded or served. The worker starts again."""

    code = "checkpoint_replaced"


class DigestsCancelledError(WorkerError):
    """The digests are not wanted any more."""

    code = "cancelled"


class FileVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a file that change when it is replaced or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )

    @property
    def changed_ns(self) -> int:
        """The time of its last change."""
        return max(self.mtime_ns, self.ctime_ns)


# ---- the cache -----------------------------------------------------------------------------------


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    version: FileVersion
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class DigestCache:
    """Digests of big files, one entry per path, in a folder of the user; None caches nothing.

    It only saves time: an entry that is missing, malformed, of another version of the file or writable by
    other users is computed again, and a folder that cannot be written to is ignored.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, path: Path, version: FileVersion) -> str | None:
        """The digest of a file; None if it has to be computed."""
        if self._folder is None:
            return None
        try:
            with self._entry(self._folder, path).open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_mode & 0o022:
                    return None
                entry = msgspec.json.decode(file.read(), type=_Entry)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return None
        return entry.digest if (entry.path, entry.version) == (str(path), version) else None

    def store(self, path: Path, version: FileVersion, digest: str) -> None:
        """Keep a digest, unless the file was changed just now."""
        if self._folder is None or time.time_ns() - version.changed_ns < _SETTLED_NS:
            return
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            entry = _Entry(path=str(path), version=version, digest=digest)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                try:
                    file.write(msgspec.json.encode(entry))
                    file.close()
                    Path(file.name).replace(self._entry(self._folder, path))
                except OSError:
                    Path(file.name).unlink(missing_ok=True)
                    raise

    @contextmanager
    def computing(self, path: Path, cancelled: Event) -> Iterator[None]:
        """Let one process of the machine compute the digest of a file; the others wait, and then find it."""
        with ExitStack() as stack:
            if self._folder is not None:
                with suppress(OSError):
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    lock = stack.enter_context(self._entry(self._folder, path).with_suffix(".lock").open("a"))
                    while not _locked(lock.fileno()):
                        if cancelled.wait(_LOOK_AGAIN_S):
                            break
            yield

    @staticmethod
    def _entry(folder: Path, path: Path) -> Path:
        return folder / f"{blake3(os.fsencode(path)).hexdigest(length=16)}.json"


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- files ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenedFiles:
    """Files that were opened before they are loaded, by path; `digests` and `check` say what was loaded.

    A path without a file is skipped: the loader reports it, if it needs it.
    """

    cache: DigestCache
    _files: dict[Path, tuple[int, FileVersion]] = field(default_factory=dict)
    _absent: set[Path] = field(default_factory=set)
    _cancelled: Event = field(default_factory=Event)

    @classmethod
    def open(cls, paths: Sequence[Path], cache: DigestCache) -> Self:
        """Open files for reading. A link is followed."""
        opened = cls(cache)
        for path in dict.fromkeys(paths):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                opened._absent.add(path)
            else:
                opened._files[path] = descriptor, FileVersion.of(os.fstat(descriptor))
        return opened

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(version.size for _, version in self._files.values())

    def digests(self, threads: int = 1) -> Mapping[Path, str]:
        """The digest of every file, BLAKE3 in hex. Blocks; other threads can compute meanwhile.

        Raises:
            CheckpointReplacedError: a file changed meanwhile.
            DigestsCancelledError: `cancel` was called.
        """
        with ThreadPoolExecutor(threads, thread_name_prefix="digests") as pool:
            return dict(zip(self._files, pool.map(self._digest, self._files), strict=True))

    def cancel(self) -> None:
        """End `digests` soon."""
        self._cancelled.set()

    def check(self) -> None:
        """Check, after the load, that the paths still lead to the opened files.

        Raises:
            CheckpointReplacedError: one does not.
        """
        for path, (_, version) in self._files.items():
            try:
                now = FileVersion.of(path.stat())
            except OSError:
                raise _replaced(path) from None
            if now != version:
                raise _replaced(path)
        for path in self._absent:
            if path.exists():
                raise _replaced(path)

    def check_unwritten(self, paths: Iterable[Path]) -> None:
        """Check that the opened files still have the content that was loaded; replaced ones do.

        For files that stay mapped into memory. A write changes a file's time before its content.

        Raises:
            CheckpointReplacedError: one was written to.
        """
        for path in paths:
            if path in self._files:
                descriptor, version = self._files[path]
                status = os.fstat(descriptor)
                if (status.st_size, status.st_mtime_ns) != (version.size, version.mtime_ns):
                    raise CheckpointReplacedError(
                        f"{path} was written to while it was served: expected it to be replaced by a rename; "
                        "the worker starts again with its present content"
                    )

    def close(self) -> None:
        """Close the files; nothing may read them any more. `check` does not need them open."""
        while self._files:
            os.close(self._files.popitem()[1][0])

    def _digest(self, path: Path) -> str:
        descriptor, version = self._files[path]
        if version.size < CACHED_FROM_BYTES:
            return self._read(path, descriptor, version)
        name = path.resolve()
        if found := self.cache.find(name, version):
            return found
        with self.cache.computing(name, self._cancelled):
            if found := self.cache.find(name, version):
                return found
            digest = self._read(path, descriptor, version)
            self.cache.store(name, version, digest)
            return digest

    def _read(self, path: Path, descriptor: int, version: FileVersion) -> str:
        """The digest of an opened file. The hash function and the reads let other threads run."""
        digest = blake3()
        buffer = memoryview(bytearray(min(_READ_BYTES, version.size + 1)))
        at = 0
        while count := os.preadv(descriptor, [buffer], at):
            digest.update(buffer[:count])
            at += count
            if self._cancelled.is_set():
                raise DigestsCancelledError("the digests of the checkpoint were cancelled")
        if at != version.size or FileVersion.of(os.fstat(descriptor)) != version:
            raise _replaced(path)
        return digest.hexdigest()


def _replaced(path: Path) -> CheckpointReplacedError:
    return CheckpointReplacedError(
        f"{path} was replaced or written to while it was loaded: expected one version of a checkpoint; the "
        "worker starts again with the present one"
    )


def combined_digest(digests: Mapping[str, str]) -> str:
    """The digest of several named digests. Equal for equal ones in every process; 64 hex characters."""
    return blake3(msgspec.msgpack.encode(dict(digests), order="sorted")).hexdigest()
