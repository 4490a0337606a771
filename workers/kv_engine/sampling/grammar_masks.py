"""Masks of guided sequences: the tokens that each may choose next, computed while the forward runs.

    step begins ── forward ─────────────────────── head, adjust ── forbidden tokens: minus infinity ── sample
               └── a thread: follow the last token, fill in the mask ──┘

The allowed tokens are determined by the last token, and are needed only when the logits are ready. So one
thread next to the engine's follows the guides of a step; the guide library releases the interpreter lock
meanwhile. A step without guided sequences has no cost.

The cost of a guide is limited by counts, but these do not bound every grammar: one may try thousands of
rules at once in one place. A thread that has spent `MASK_S` of CPU time on one token is abandoned. Its guide
is banned, so the requests that use it fail, and another thread continues with the rest.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import Final, TypeVar

import numpy as np
import torch

from workers.kv_engine.guide_state import GuideState
from workers.kv_engine.sequence import Sequence, Span
from workers.machine.transfers import upload

_T = TypeVar("_T")

MASK_S: Final = 0.5
"""The most CPU time for one token of one answer: a hundred times what most masks take."""
_NS_PER_S: Final = 1_000_000_000
_LOWEST_PRIORITY: Final = 19
"""The operating system's lowest priority (nice value)."""
_ALL_ALLOWED: Final = 0xFF
_BIT_VALUES: Final = tuple(1 << place for place in range(8))


class StepMasks:
    """The masks of one step, which may still be in progress.

    Attributes:
        rows: the guided rows among the step's sampled rows.
        keys: the keys of their sequences.
    """

    def __init__(self, rows: list[int], keys: list[str], wait: "Callable[[], _MaskResult]") -> None:
        self.rows: Final = rows
        self.keys: Final = keys
        self._wait = wait

    def apply(self, logits: torch.Tensor) -> dict[str, Exception]:
        """Wait for the masks, and set forbidden logits to minus infinity, (S, V) float32, in place.

        Returns:
            The sequences whose guide failed, with the error.
        """
        result = self._wait()
        forbidden = result.on(logits.device, logits.shape[-1])
        if len(self.rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            rows = upload(np.array(self.rows, np.int64), logits.device)
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
        return result.failures


@dataclass(frozen=True, slots=True)
class _MaskResult:
    """The masks of G guided rows.

    Attributes:
        bits: the allowed tokens, (G, bytes) uint8, lowest bit first; pinned for a GPU.
        flags: the forbidden tokens, (G, vocabulary) bool; on a CPU only.
        failures: errors of guides, by sequence key.
    """

    bits: torch.Tensor
    flags: torch.Tensor | None
    failures: dict[str, Exception]

    def on(self, device: torch.device, vocab_size: int) -> torch.Tensor:
        """Return the forbidden tokens as flags on the device: (G, vocabulary) bool."""
        if self.flags is not None:
            return self.flags
        return unpack_forbidden(self.bits.to(device, non_blocking=True), vocab_size)


def unpack_forbidden(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return a flag for each bit that is not set: (G, bytes) uint8 to (G, vocab_size) bool."""
    return (bits[:, :, None] & _bit_values(bits.device) == 0).flatten(1)[:, :vocab_size]


@cache
def _bit_values(device: torch.device) -> torch.Tensor:
    return torch.tensor(_BIT_VALUES, dtype=torch.uint8, device=device)


class _MaskDeadline:
    """The guide that a thread is following, and the CPU time at which it must have finished."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._current: tuple[GuideState, int, int] | None = None

    def begin(self, guide_state: GuideState, ids: Items[int]) -> bool:
        """Start with a guide, in the mask thread; return False if the thread has been abandoned."""
        until_ns = time.thread_time_ns() + round(guide_state.unread(ids) * MASK_S * _NS_PER_S)
        with self._lock:
            self._current = (guide_state, threading.get_ident(), until_ns)
            return not self._is_abandoned

    def end(self) -> None:
        """Mark all guides as done, in the mask thread."""
        with self._lock:
            self._current = None

    def abandon(self) -> GuideState | None:
        """Abandon the mask thread if it has used up its time, and return its current guide; else return None.

        Called from the engine's thread, concurrently. The mask thread then starts with no other guide,
        because only one thread may use a matcher at a time.
        """
        with self._lock:
            if self._current is None:
                return None
            guide_state, thread, until_ns = self._current
            self._is_abandoned = time.clock_gettime_ns(time.pthread_getcpuclockid(thread)) > until_ns
            return guide_state if self._is_abandoned else None


class _MaskThread:
    """A daemon thread that runs submitted work in order; it ends when this object is no longer referenced.

    It is not from a thread pool, because Python waits for pool threads at exit, and an abandoned thread would
    keep the process alive.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_queue, args=(self._queue,), name="guide", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    def abandon(self) -> None:
        """Give the thread the lowest priority: no one waits for its result."""
        if sys.platform == "linux" and self._thread.native_id is not None:
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _LOWEST_PRIORITY)

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._queue.put(partial(_resolve, future, work))
        return future


def _run_queue(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # release its references while waiting for the next


def _resolve(future: "Future[_T]", work: Callable[[], _T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
        future.set_exception(error)
    else:
        future.set_result(result)


class GuideThread:
    """Computes the masks of a step's guided sequences in another thread.

    The thread starts with the first guided sequence. The buffer holds the masks of one step, so call `apply`
    before the next step begins.
    """

    def __init__(self, *, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._shape = (max_sequences, (vocab_size + 7) // 8)
        self._is_cuda = device.type == "cuda"
        self._buffer: torch.Tensor | None = None
        self._thread: _MaskThread | None = None

    def begin(self, spans: "Items[Span]") -> StepMasks | None:
        """Start computing the masks of a step; return None if no sequence in it is guided."""
        if all(span.sequence.guide_state is None for span in spans):
            return None
        rows: list[int] = []
        guided: list[tuple[Sequence, GuideState]] = []
        place = 0
        for span in spans:
            if not span.samples:
                continue
            sequence = span.sequence
            if sequence.guide_state is not None:
                assert not span.drafted, "guided sequences do not speculate"
                rows.append(place)
                guided.append((sequence, sequence.guide_state))
            place += 1 + span.drafted
        if not rows:
            return None
        keys = [sequence.spec.key for sequence, _ in guided]
        begun = self._submit(guided)
        return StepMasks(rows, keys, lambda: self._wait(guided, *begun))

    def _submit(
        self, guided: "list[tuple[Sequence, GuideState]]"
    ) -> "tuple[Future[_MaskResult], _MaskDeadline]":
        if self._thread is None or self._buffer is None:
            self._thread = _MaskThread()
            self._buffer = torch.zeros(self._shape, dtype=torch.uint8, pin_memory=self._is_cuda)
        deadline = _MaskDeadline()
        return self._thread.submit(partial(self._fill, guided, self._buffer, deadline)), deadline

    def _wait(
        self,
        guided: "list[tuple[Sequence, GuideState]]",
        future: "Future[_MaskResult]",
        deadline: _MaskDeadline,
    ) -> _MaskResult:
        while True:
            try:
                return future.result(MASK_S)
            except TimeoutError:
                stuck = deadline.abandon()
            if stuck is None:
                continue  # the thread has not had the CPU, or all rows together take long
            stuck.ban()
            if self._thread is not None:
                self._thread.abandon()
            self._thread = self._buffer = None
            future, deadline = self._submit(guided)

    def _fill(
        self, guided: "list[tuple[Sequence, GuideState]]", buffer: torch.Tensor, deadline: _MaskDeadline
    ) -> _MaskResult:
        """Compute the masks, in the mask thread."""
        bits, failures = buffer[: len(guided)], dict[str, Exception]()
        host = bits.numpy()
        for row, (sequence, follower) in zip(host, guided, strict=True):
            row[:] = 0
            if not deadline.begin(follower, sequence.ids):
                break
            begun_s = time.thread_time()
            try:
                allowed = follower.allowed(sequence.ids)
                known = min(len(row), len(allowed))
                row[:known] = allowed[:known]
            except Exception as error:  # noqa: BLE001 - an error of a guide fails one sequence
                failures[sequence.spec.key] = error
                row[:] = _ALL_ALLOWED
            follower.mask_s = time.thread_time() - begun_s
        deadline.end()
        flags: torch.Tensor | None = None
        if not self._is_cuda:
            turned = np.unpackbits(~host, axis=-1, count=self._vocab_size, bitorder="little")
            flags = torch.from_numpy(turned.view(np.bool_))
        return _MaskResult(bits, flags, failures)
