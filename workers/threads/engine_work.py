"""The record of one sequence, run or call in an engine: its waits, its steps and its neighbours.

The caller makes it and gives it to the engine with the request. The engine's thread writes it, and the event
loop reads it, mostly when the engine has ended its part. So fields that belong together are one tuple, which
is replaced at once, and no container is changed in place. Times are those of `time.perf_counter`, in seconds.
Imports no torch.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from shared.events import MAX_NAMED

Lack: TypeAlias = Literal["", "places", "kv_blocks", "prefix"]
"""What a sequence waits for: a place in the batch, KV blocks, or a prefix that another one computes."""

_PROMPTS_KEPT: Final = 64
"""The last prompts whose tokens are known to those that were computed beside them."""


@dataclass(slots=True)
class StepCounts:
    """The steps of an engine since it was made, the rows in them, and the time of those with prompts."""

    steps: int = 0
    rows: int = 0
    prompts_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
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


class Drafts(NamedTuple):
    """The drafted tokens of a sequence, the accepted ones, and the steps where none would have paid."""

    drafted: int = 0
    accepted: int = 0
    declined_steps: int = 0


class _Steps(NamedTuple):
    """Steps and rows that are over, and the counts of the engine when its present place began."""

    steps: int = 0
    rows: int = 0
    counts: StepCounts | None = None
    begun_steps: int = 0
    begun_rows: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class EngineWork:
    """What an engine has done for a sequence, a run or a call so far.

    Attributes:
        queued_s: when it was given to the engine; None before that.
        admitted_s, first_token_s, ended_s: None before that.
        lacked: what it waited for when it was first not admitted.
        behind: the keys of the first sequences that had places, or came first, at that time.
        behind_count: the number of all of them.
        cached_tokens: how many of its tokens were cached at its first admission.
        evictions: the first `MAX_NAMED` preemptions; `eviction_count` is the number of all, and `evicted_s`
            the sum of the waits that have ended, with `evicted_since_s` the begin of one that has not.
        decoding: the number of the step, and the engine's time with prompts, after which it decodes.
        beside: by key, the tokens of prompts that were computed in the steps since; set at its end.
        beside_s: the durations of those steps.
        held_s: the sum of the pauses that have ended; `held_since_s` is the begin of one that has not.
        drafts: what speculative decoding did for it.
    """

    queued_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    lacked: Lack = ""
    behind: tuple[str, ...] = ()
    behind_count: int = 0
    cached_tokens: int = 0
    evictions: tuple[Eviction, ...] = ()
    eviction_count: int = 0
    evicted_s: float = 0.0
    evicted_since_s: float | None = None
    decoding: tuple[int, float] | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    beside_s: float = 0.0
    held_s: float = 0.0
    held_since_s: float | None = None
    drafts: Drafts = field(default_factory=Drafts)
    _computed: int = 0
    _steps: _Steps = field(default_factory=_Steps)

    # ---- written by the caller -----------------------------------------------------------------------
    def queue(self) -> None:
        """Note that it is given to the engine now."""
        self.queued_s = time.perf_counter()

    def token(self) -> None:
        """Note its first token of this engine; later ones change nothing."""
        if self.first_token_s is None and self.queued_s is not None:
            self.first_token_s = time.perf_counter()

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
        elif self.evicted_since_s is not None:
            self.evicted_s, self.evicted_since_s = self.evicted_s + now_s - self.evicted_since_s, None
            if self.eviction_count <= MAX_NAMED:
                recomputed = max(0, self._computed - computed)
                last = replace(self.evictions[-1], recomputed=recomputed, ended_s=now_s)
                self.evictions = (*self.evictions[:-1], last)

    def evict(self, by: str, computed: int) -> None:
        """Note a preemption after `computed` tokens."""
        now_s = time.perf_counter()
        self.eviction_count += 1
        self.evicted_since_s, self._computed = now_s, computed
        if self.eviction_count <= MAX_NAMED:
            self.evictions = (*self.evictions, Eviction(at_s=now_s, by=by))

    def hold(self, *, held: bool) -> None:
        """Note a pause, or its end."""
        if held and self.held_since_s is None:
            self.held_since_s = time.perf_counter()
        elif not held and self.held_since_s is not None:
            self.held_s, self.held_since_s = self.held_s + time.perf_counter() - self.held_since_s, None

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Note a draft, and how many of its tokens were accepted."""
        before = self.drafts
        self.drafts = before._replace(drafted=before.drafted + drafted, accepted=before.accepted + accepted)

    def decline_draft(self) -> None:
        """Note a step without a draft, because none would have paid."""
        self.drafts = self.drafts._replace(declined_steps=self.drafts.declined_steps + 1)

    def count_step(self, rows: int) -> None:
        """Note a step that computed it, with so many rows."""
        before = self._steps
        self._steps = before._replace(steps=before.steps + 1, rows=before.rows + rows)

    def take_place(self, counts: StepCounts) -> None:
        """Note that it got a place in an engine that counts its steps: none of them has to be noted here."""
        self._steps = self._steps._replace(counts=counts, begun_steps=counts.steps, begun_rows=counts.rows)
        if self.decoding is None:
            self.decode(counts)

    def decode(self, counts: StepCounts) -> None:
        """Note that its prompt is computed: the next step decodes."""
        self.decoding = counts.steps, counts.prompts_s

    def leave_place(self) -> None:
        """Note that it gave its place back."""
        steps, rows = self.so_far
        self._steps = _Steps(steps, rows)

    def end(self) -> None:
        """Note that it has left the engine."""
        if self.ended_s is None:
            self.hold(held=False)
            self.ended_s = time.perf_counter()
            if self.evicted_since_s is not None:
                self.evicted_s, self.evicted_since_s = (
                    self.evicted_s + self.ended_s - self.evicted_since_s,
                    None,
                )

    # ---- for the reader ------------------------------------------------------------------------------
    @property
    def so_far(self) -> tuple[int, int]:
        """The engine steps while it had a place, or that computed it, and the sum of the rows in them."""
        known = self._steps
        if known.counts is None:
            return known.steps, known.rows
        steps = known.steps + known.counts.steps - known.begun_steps
        return steps, known.rows + known.counts.rows - known.begun_rows


class Prompts:
    """The last prompts and passes that were computed, to tell what was computed beside a sequence."""

    def __init__(self, counts: StepCounts) -> None:
        self._counts = counts
        self._last: dict[str, tuple[int, int]] = {}  # by key: the number of the last step, and all tokens

    def add(self, took_s: float, prompts: Sequence[tuple[str, int]]) -> None:
        """Note the present step: its duration, and the tokens of each prompt in it."""
        self._counts.prompts_s += took_s
        for key, tokens in prompts:
            _, before = self._last.pop(key, (0, 0))
            self._last[key] = self._counts.steps, before + tokens
        while len(self._last) > _PROMPTS_KEPT:
            del self._last[next(iter(self._last))]

    def note_beside(self, key: str, work: EngineWork) -> None:
        """Write the prompts that were computed since a sequence decodes into its record."""
        if work.decoding is None:
            return
        begun, prompts_s = work.decoding
        work.beside_s = self._counts.prompts_s - prompts_s
        work.beside = {
            other: tokens for other, (last, tokens) in self._last.items() if last > begun and other != key
        }
