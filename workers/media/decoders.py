"""The decoder processes of a worker, as its threads use them.

    thread of a CPU node ──lease──> idle decoder, or a new process ──job──> decoded arrays
                                          │
                       dead, too slow, out of memory: killed, and replaced by the next lease

At most `count` processes run; further threads wait. A process that dies gets the job no second time unless
it had served others before: then the fault may be theirs, or of someone who ended it from outside.
"""

import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import Any, BinaryIO, Final, TypeVar

from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError
from shared.errors import CapacityError
from workers.media import wire

_T = TypeVar("_T")

BASE_BYTES: Final = 384 << 20
"""The memory of a decoder beside the pixels: of codecs, and of a file's structure."""
PIXEL_BYTES: Final = 24
"""The memory per pixel that a format may need: decoded, converted, rotated; a video has reference frames."""
_START_S: Final = 60.0
"""The time that a process may take to start; it is no file's fault."""
_COMMAND: Final = (sys.executable, "-s", "-P", "-m", "workers.media.decoder_process")
_KINDS: Final = (MediaError, MediaTooLargeError, UnsupportedMediaError)
_ERRORS: Final[dict[str, type[MediaError]]] = {kind.code: kind for kind in _KINDS}


class DecoderLostError(Exception):
    """The process has ended within a job."""


class Decoder:
    """One process; a lease's holder calls it from one thread."""

    def __init__(self, memory_bytes: int) -> None:
        self.jobs = 0
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), str(memory_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),  # none of the worker's: it may hold credentials
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt of the terminal is the worker's
            )
        self.sock = ours
        self._finalizer = weakref.finalize(self, _end, self._process, ours)

    @property
    def pid(self) -> int:
        """The process, for tests and logs."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the process has started.

        Raises:
            CapacityError: it did not.
        """
        try:
            self.sock.settimeout(_START_S)
            wire.receive(self.sock)
        except (TimeoutError, OSError, wire.ClosedError) as error:
            self.end()
            raise CapacityError("a decoder of media could not be started; try again later") from error

    @property
    def is_alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self._finalizer()


@dataclass(slots=True)
class Job:
    """A job under way: the messages of a decoder, until a deadline.

    Attributes:
        is_over: the decoder waits for its next job.
    """

    _sock: socket.socket
    _until_s: float
    _timeout_s: float
    is_over: bool = False

    def begin(self, message: dict[str, Any], file: BinaryIO) -> None:
        """Send the job.

        Raises:
            DecoderLostError: the process has ended.
        """
        with self._within_time():
            wire.send(self._sock, message, file=file.fileno())

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            DecoderLostError: the process has ended.
        """
        with self._within_time():
            wire.send(self._sock, message)

    def receive(self) -> dict[str, Any]:
        """Receive the next message.

        Raises:
            MediaError: the file is refused, or takes too long.
            DecoderLostError: the process has ended.
        """
        with self._within_time():
            found = wire.receive(self._sock)
        if code := found.get("error"):
            self.is_over = True
            raise _refusal(str(code), str(found.get("message", "")))
        return found

    def read_into(self, view: memoryview) -> None:
        """Receive the bytes that follow a message; it raises what `receive` raises."""
        with self._within_time():
            wire.read_into(self._sock, view)

    @contextmanager
    def _within_time(self) -> Iterator[None]:
        left_s = self._until_s - time.monotonic()
        try:
            self._sock.settimeout(max(left_s, 0.001))
            yield
        except TimeoutError:
            raise MediaTooLargeError(
                f"decoding took more than {self._timeout_s:g} s (media.decode_timeout_s): send a smaller file"
            ) from None
        except (wire.ClosedError, OSError) as error:
            raise DecoderLostError(str(error)) from error


class Decoders:
    """The decoder processes of one worker. Thread-safe.

    Args:
        count: the most processes.
        timeout_s: the time of one job.
        limits: the limits of one medium.
        memory_bytes: the memory of a process beside what it needs idle; by default, what the limits need.
    """

    def __init__(
        self, count: int, timeout_s: float, limits: MediaLimits, *, memory_bytes: int | None = None
    ) -> None:
        self.count: Final = count
        self.timeout_s: Final = timeout_s
        self.limits: Final = limits
        self._memory_bytes = memory_bytes or BASE_BYTES + limits.max_pixels * PIXEL_BYTES
        self._slots = BoundedSemaphore(count)
        self._lock = Lock()
        self._idle: list[Decoder] = []
        self._busy: set[Decoder] = set()
        self._closed = False

    def run(self, kind: str, file: BinaryIO, use: Callable[[Job], _T], **fields: Any) -> _T:
        """Decode a file: `use` receives the messages of the job, and returns the result. It blocks.

        Raises:
            MediaError: the file is damaged, of another kind, beyond a limit, or ends its decoder.
            CapacityError: no decoder was free in time, or the worker ends.
        """
        while True:
            with self._lease() as decoder:
                decoder.jobs += 1
                try:
                    return self._run(decoder, kind, file, use, fields)
                except DecoderLostError as lost:
                    if decoder.jobs == 1 and not self._closed:
                        raise MediaError(
                            "expected a file that can be decoded; the process that decoded it has ended"
                        ) from lost

    @property
    def pids(self) -> list[int]:
        """The processes at present, for tests and logs."""
        with self._lock:
            return [decoder.pid for decoder in [*self._idle, *self._busy]]

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed = True
            ending = [*self._idle, *self._busy]
            self._idle.clear()
        for decoder in ending:
            decoder.end()

    def _run(
        self, decoder: Decoder, kind: str, file: BinaryIO, use: Callable[[Job], _T], fields: dict[str, Any]
    ) -> _T:
        if decoder.jobs == 1:
            decoder.wait_ready()
        job = Job(decoder.sock, time.monotonic() + self.timeout_s, self.timeout_s)
        message = {"kind": kind, "timeout_s": self.timeout_s, "limits": _plain(self.limits), **fields}
        try:
            job.begin(message, file)
            return use(job)
        finally:
            if not job.is_over:
                decoder.end()

    @contextmanager
    def _lease(self) -> Iterator[Decoder]:
        """Lend an idle decoder, or start one."""
        if not self._slots.acquire(timeout=2 * self.timeout_s):
            raise CapacityError("the decoders of media are busy; try again later")
        try:
            decoder = self._take()
            try:
                yield decoder
            finally:
                self._put(decoder)
        finally:
            self._slots.release()

    def _take(self) -> Decoder:
        with self._lock:
            if self._closed:
                raise CapacityError("the worker ends; try again later")
            while self._idle:
                decoder = self._idle.pop()
                if decoder.is_alive:
                    break
                decoder.end()
            else:
                decoder = Decoder(self._memory_bytes)
            self._busy.add(decoder)
            return decoder

    def _put(self, decoder: Decoder) -> None:
        with self._lock:
            self._busy.discard(decoder)
            if decoder.is_alive and not self._closed:
                self._idle.append(decoder)
                return
        decoder.end()


def _refusal(code: str, message: str) -> MediaError:
    """The error that a decoder reports."""
    if code == "memory":
        return MediaTooLargeError("decoding takes more memory than a decoder may use: send a smaller file")
    return _ERRORS.get(code, MediaError)(message[:1000])


def _plain(limits: MediaLimits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in MediaLimits.__slots__}


def _environment() -> dict[str, str]:
    """The environment of a decoder: where its modules are, and one thread per library."""
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)  # noqa: PTH100 - '' is this folder
    return {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}


def _end(process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()
    sock.close()
