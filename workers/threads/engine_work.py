"""The record of one sequence, run or firing in an engine: its waits, its steps and its neighbours.

The caller makes it and gives it to the engine with the request. The engine's thread writes it, and the event
loop reads it once the engine has ended its part; no field is changed in place that a reader iterates over,
so it needs no lock. Times are those of `time.perf_counter`, in seconds. Imports no torch.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from shared.events import MAX_NAMED

Lack: TypeAlias = Literal["", "places", "kv_blocks", "prefix"]
"""What a sequence waits for: a place in the batch, KV blocks, or a prefix that another one computes."""

_PROMPT_STEPS: Final = 1024
"""The last steps with prompts whose neighbours are known."""


@dataclass(slots=True)
class StepCounts:
    """The steps of an engine since it was made, and the sum of the rows in them."""

    steps: int = 0
    rows: int = 0


@dataclass(slots=True, kw_only=True)
class Eviction:
    """A preemption: the sequence gave its blocks back.

    Attributes:
        by: the key of the sequence that needed a block, or of the first one that kept its own.
        recomputed: how many of its tokens were computed again; known at its next admission.
        ended_s: the time of its next admission; None before that.
    """

    at_s: float
    by: str
    recomputed: int = 0
    ended_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class EngineWork:
    """What an engine has done for a sequence, a run or a firing so far.

    Attributes:
        queued_s: when it was given to the engine.
        admitted_s, first_token_s, ended_s: None before that.
        lacked: what it waited for when it was first not admitted.
        behind: the keys of the first sequences that had places, or came first, at that time.
        behind_count: the number of all of them.
        cached_tokens: how many of its tokens were cached at its first admission.
        steps: the steps that computed it, or that a sequence had a place in; `rows` is the sum of the rows of
            their batches.
        evictions: the first `MAX_NAMED` of them; `eviction_count` is the number of all.
        before_first: the number of the step before its first one; None before that.
        beside: by key, the prompt tokens of others that were computed in the steps since; set at its end.
        beside_s: the durations of those steps.
        held_s: the sum of the pauses that have ended; `held_since_s` is the begin of one that has not.
    """

    queued_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    lacked: Lack = ""
    behind: tuple[str, ...] = ()
    behind_count: int = 0
    cached_tokens: int = 0
    steps: int = 0
    rows: int = 0
    evictions: list[Eviction] = field(default_factory=list)
    eviction_count: int = 0
    before_first: int | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    beside_s: float = 0.0
    held_s: float = 0.0
    held_since_s: float | None = None
    _computed: int = 0
    _begun: tuple[int, int] = (0, 0)
    _counts: StepCounts | None = None

    # ---- written by the engine -----------------------------------------------------------------------
    def wait_for(self, lack: Lack, behind: Sequence[str]) -> None:
        """Note what it waits for, and behind whom; only the first note counts."""
        if not self.lacked and self.admitted_s is None:
            self.behind, self.behind_count = tuple(behind[:MAX_NAMED]), len(behind)
            self.lacked = lack

    def admit(self, *, cached: int = 0, computed: int = 0) -> None:
        """Note an admission: `cached` tokens were found, `computed` ones in all need no computation."""
        now_s = time.perf_counter()
        if self.admitted_s is None:
            self.admitted_s, self.cached_tokens = now_s, cached
        elif self.evictions and self.evictions[-1].ended_s is None:
            last = self.evictions[-1]
            last.recomputed, last.ended_s = max(0, self._computed - computed), now_s

    def evict(self, by: str, computed: int) -> None:
        """Note a preemption after `computed` tokens."""
        self.eviction_count += 1
        self._computed = computed
        if len(self.evictions) < MAX_NAMED:
            self.evictions.append(Eviction(at_s=time.perf_counter(), by=by))

    def hold(self, *, held: bool) -> None:
        """Note a pause, or its end."""
        if held and self.held_since_s is None:
            self.held_since_s = time.perf_counter()
        elif not held and self.held_since_s is not None:
            self.held_s += time.perf_counter() - self.held_since_s
            self.held_since_s = None

    def count_step(self, number: int, rows: int) -> None:
        """Note a step that computed it, with so many rows."""
        if self.before_first is None:
            self.before_first = number - 1
        self.steps += 1
        self.rows += rows

    def take_place(self, counts: StepCounts) -> None:
        """Note that it got a place in an engine that counts its steps: none of them has to be noted here."""
        if self.before_first is None:
            self.before_first = counts.steps
        self._begun, self._counts = (counts.steps, counts.rows), counts

    def leave_place(self) -> None:
        """Note that it gave its place back."""
        (self.steps, self.rows), self._counts = self.so_far, None

    def end(self) -> None:
        """Note that it has left the engine."""
        if self.ended_s is None:
            self.hold(held=False)
            self.ended_s = time.perf_counter()

    # ---- for the reader ------------------------------------------------------------------------------
    @property
    def so_far(self) -> tuple[int, int]:
        """`steps` and `rows`, with those since it got its place, if it still has it."""
        counts, (steps, rows) = self._counts, self._begun
        if counts is None:
            return self.steps, self.rows
        return self.steps + counts.steps - steps, self.rows + counts.rows - rows

    def token(self) -> None:
        """Note its first token; later ones change nothing."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()


class PromptSteps:
    """The last steps that computed prompts or passes, to tell who was computed beside a sequence."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, list[tuple[str, int]]]] = deque(maxlen=_PROMPT_STEPS)

    def add(self, number: int, took_s: float, prompts: list[tuple[str, int]]) -> None:
        """Note a step: its number, its duration, and the tokens of each prompt in it."""
        self._steps.append((number, took_s, prompts))

    def note_beside(self, key: str, work: EngineWork) -> None:
        """Write the neighbours of a sequence, since its first step, into its record."""
        if work.before_first is None:
            return
        beside, beside_s = Counter[str](), 0.0
        for number, took_s, prompts in reversed(self._steps):
            if number <= work.before_first:
                break
            others = [(other, tokens) for other, tokens in prompts if other != key]
            beside_s += took_s if others else 0.0
            for other, tokens in others:
                beside[other] += tokens
        work.beside, work.beside_s = beside, beside_s
