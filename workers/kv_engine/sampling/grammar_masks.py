"""Guided sequences: which tokens each of them may choose next, told while the forward runs.

    step begins ── forward ─────────────────────── head, adjust ── the rest is minus infinity ── sample
               └── a thread: follow the last token, fill in the mask ──┘

What may come next is known as soon as the last token is, and nobody needs it before the logits are there. So
one thread beside the engine's follows the guides of a step; the library lets go of the interpreter while it
does. A step in which nobody is guided knows nothing of all this.

How much a guide may take is counted, and counts do not bound everything: a grammar may have a place at which
thousands of rules are tried at once. A thread that has spent `MASK_S` of its own time on one token is left to
itself. The guide it follows is condemned, so the requests that follow it fail; another thread goes on with
the rest.

Of the tokens that end an answer: they are chosen where the guide may end, and nowhere else; before
`min_tokens`, or where the guide is to be exhausted, only where nothing else may follow.
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
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeVar

import numpy as np
import torch

from workers.kv_engine.guide_state import GuideState
from workers.kv_engine.sequence import Sequence, Span

_T = TypeVar("_T")

MASK_S: Final = 0.5
"""How long a thread may compute for one token of one answer: a hundred times what a mask mostly takes."""
_NS_PER_S: Final = 1_000_000_000
_LAST: Final = 19
"""The lowest priority, in the operating system's measure."""
_EVERYTHING: Final = 0xFF
_PLACES: Final = tuple(1 << place for place in range(8))


class StepMasks:
    """The masks of one step, under way.

    Attributes:
        rows: which of the step's sampled rows are guided; `keys`, whose these are.
    """

    def __init__(self, rows: list[int], keys: list[str], forbidden: "Callable[[], _Forbidden]") -> None:
        self.rows: Final = rows
        self.keys: Final = keys
        self._forbidden = forbidden

    def apply(self, logits: torch.Tensor) -> dict[str, Exception]:
        """Take what is not allowed from the logits, (S, V) float32, in place; who failed of it, and why.

        Waits until the masks are there.
        """
        told = self._forbidden()
        forbidden = told.on(logits.device, logits.shape[-1])
        if len(self.rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            rows = torch.tensor(self.rows, device=logits.device)
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
        return told.failures


@dataclass(frozen=True, slots=True)
class _Forbidden:
    """What G guided rows may not choose, and who failed of being told.

    Attributes:
        bits: what they may, (G, bytes) uint8, lowest bit first; pinned for a GPU.
        flags: what they may not, (G, vocabulary) bool; on a CPU alone.
    """

    bits: torch.Tensor
    flags: torch.Tensor | None
    failures: dict[str, Exception]

    def on(self, device: torch.device, vocab_size: int) -> torch.Tensor:
        """As flags on the device: (G, vocabulary) bool."""
        if self.flags is not None:
            return self.flags
        return unpacked(self.bits.to(device, non_blocking=True), vocab_size)


def unpacked(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Which bits are not set: (G, bytes) uint8, lowest bit first, to (G, vocab_size) bool."""
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=bits.device)
    return (bits[:, :, None] & places == 0).flatten(1)[:, :vocab_size]


class _Turn:
    """Whose mask a thread is making, and until when of the time that it computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_left = False
        self._now: tuple[GuideState, int, int] | None = None

    def begin(self, guided: GuideState, ids: Items[int]) -> bool:
        """Called in the thread; False where nobody waits for it any more."""
        until_ns = time.thread_time_ns() + round(guided.unread(ids) * MASK_S * _NS_PER_S)
        with self._lock:
            self._now = (guided, threading.get_ident(), until_ns)
            return not self._is_left

    def end(self) -> None:
        """Called in the thread: all have had theirs."""
        with self._lock:
            self._now = None

    def leave(self) -> GuideState | None:
        """Leave the thread to itself if it has used up its time, and say whom it follows; None where not.

        Called beside the thread, which is computing. It begins with nobody else then: a matcher is for one
        thread at a time.
        """
        with self._lock:
            if self._now is None:
                return None
            guided, thread, until_ns = self._now
            self._is_left = time.clock_gettime_ns(time.pthread_getcpuclockid(thread)) > until_ns
            return guided if self._is_left else None


class _Thread:
    """A thread that does one thing after the other, for as long as somebody holds this.

    None of a pool's: at its end Python waits for those, and one that is left to itself would keep a process
    that has to end.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._asked,), name="guide", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._asked.put, None)

    def leave(self) -> None:
        """Nobody waits for it any more: it computes on when nobody else wants the core."""
        if sys.platform == "linux" and self._thread.native_id is not None:
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _LAST)

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._asked.put(partial(_fulfil, future, work))
        return future


def _work(asked: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (one := asked.get()) is not None:
        one()
        del one  # while the next is waited for, nothing is held that asked


def _fulfil(future: "Future[_T]", work: Callable[[], _T]) -> None:
    try:
        found = work()
    except BaseException as error:  # noqa: BLE001 - raised again by who waits
        future.set_exception(error)
    else:
        future.set_result(found)


class GuideThread:
    """Tells what the guided sequences of a step may choose, in a thread of its own.

    The thread begins with the first guided sequence. One step's masks are in the buffer at a time: `apply`
    them before the next step begins.
    """

    def __init__(self, *, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._shape = (max_sequences, (vocab_size + 7) // 8)
        self._is_cuda = device.type == "cuda"
        self._buffer: torch.Tensor | None = None
        self._thread: _Thread | None = None

    def begin(self, spans: "Items[Span]") -> StepMasks | None:
        """Begin with the masks of a step; None where nobody in it is guided."""
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
                assert not span.drafted, "what is guided is not guessed"
                rows.append(place)
                guided.append((sequence, sequence.guide_state))
            place += 1 + span.drafted
        if not rows:
            return None
        keys = [sequence.spec.key for sequence, _ in guided]
        begun = self._submit(guided)
        return StepMasks(rows, keys, lambda: self._wait(guided, *begun))

    def _submit(self, guided: "list[tuple[Sequence, GuideState]]") -> "tuple[Future[_Forbidden], _Turn]":
        if self._thread is None or self._buffer is None:
            self._thread = _Thread()
            self._buffer = torch.zeros(self._shape, dtype=torch.uint8, pin_memory=self._is_cuda)
        turn = _Turn()
        return self._thread.submit(partial(self._fill, guided, self._buffer, turn)), turn

    def _wait(
        self, guided: "list[tuple[Sequence, GuideState]]", future: "Future[_Forbidden]", turn: _Turn
    ) -> _Forbidden:
        while True:
            try:
                return future.result(MASK_S)
            except TimeoutError:
                stuck = turn.leave()
            if stuck is None:
                continue  # it was not given the processor, or its rows take so long together
            stuck.condemn()
            if self._thread is not None:
                self._thread.leave()
            self._thread = self._buffer = None
            future, turn = self._submit(guided)

    def _fill(
        self, guided: "list[tuple[Sequence, GuideState]]", buffer: torch.Tensor, turn: _Turn
    ) -> _Forbidden:
        """Called in the thread."""
        bits, failures = buffer[: len(guided)], dict[str, Exception]()
        host = bits.numpy()
        for row, (sequence, follower) in zip(host, guided, strict=True):
            row[:] = 0
            if not turn.begin(follower, sequence.ids):
                break
            try:
                allowed = follower.allowed(sequence.ids)
                known = min(len(row), len(allowed))
                row[:known] = allowed[:known]
            except Exception as error:  # noqa: BLE001 - whatever its guide is, it is one sequence's
                failures[sequence.spec.key] = error
                row[:] = _EVERYTHING
        turn.end()
        flags: torch.Tensor | None = None
        if not self._is_cuda:
            turned = np.unpackbits(~host, axis=-1, count=self._vocab_size, bitorder="little")
            flags = torch.from_numpy(turned.view(np.bool_))
        return _Forbidden(bits, flags, failures)
