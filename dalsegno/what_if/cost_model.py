"""The cost of an engine step, learned from the recorded work of sequences. Pure.

    t(rows, prefill tokens) = pace(time) * noise * (step_s + row_s * rows + token_s * prefill tokens)

From its first token on, a sequence is in each step. So the time from there to its last token is the sum of
the durations of these steps. The log has that sum, the number of the steps, the mean number of their rows,
and the prompt tokens of others that were computed in them: one linear equation per sequence, solved by least
squares. Costs are not negative: a term that would be is left out. (Before its first token, a sequence may be
left out of steps, because prompts have a budget. A sequence that was preempted gives no equation.)

The pace is how much slower than usual the machine was at a time, because other programs ran there, too, or it
was hot. It is constant in each of a few spans of the recording, and learned from the same equations in turn
with the costs. At other times it is 1. The noise is what is left, drawn for each step.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import Final, TypeAlias

import numpy as np

Vector: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
Matrix: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.float64]]"

_PER_SPAN: Final = 6
"""Sequences for each span of the pace."""
_FEWEST_SPANS: Final = 2
_TURNS: Final = 5
"""The number of rounds in which costs and pace are fitted in turn."""
_MOST_PACE: Final = 10.0
_ALIKE: Final = 0.1
"""The weight of the likeness of neighbouring spans, in shares of what a span's own sequences weigh."""
_FEWEST: Final = 4
"""Sequences below which nothing is learned: as many as terms, and one to contradict them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Recorded consecutive steps of one sequence.

    Attributes:
        took_s: the sum of their durations.
        steps: their number; `rows` is the mean number of rows in them.
        prefill_tokens: the prompt tokens that were computed in them.
        begin_s, end_s: when they ran, by the log's clock.
    """

    took_s: float
    steps: int
    rows: float
    prefill_tokens: int
    begin_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The slowness of steps over time, as a multiple of the usual.

    Attributes:
        bounds: of the spans, ascending, one more than spans; by the log's clock, in seconds.
        factors: of each span.
    """

    bounds: Sequence[float] = ()
    factors: Sequence[float] = ()

    def at(self, time_s: float) -> float:
        """The factor at a time; 1 before the first span and after the last one."""
        place = bisect_right(self.bounds, time_s) - 1
        return self.factors[place] if 0 <= place < len(self.factors) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The duration of a step at the usual pace, in seconds: in all, per row, and per prompt token.

    Attributes:
        noise: the standard deviation of the logarithm of a step's duration at a given pace.
        mean_rows: the mean number of rows that was seen.
        most_rows: the highest mean number of rows that was seen; beyond it, the cost is extrapolated.
    """

    step_s: float
    row_s: float
    token_s: float
    noise: float = 0.0
    mean_rows: float = 1.0
    most_rows: float = 0.0
    pace: Pace = Pace()

    def of(self, rows: int, prefill_tokens: int, at_s: float = inf) -> float:
        """The duration of a step that begins at `at_s`, by the log's clock."""
        usual_s = self.step_s + self.row_s * rows + self.token_s * prefill_tokens
        return usual_s * self.pace.at(at_s)


def fitted(samples: Sequence[Sample], token_s: float | None = None) -> StepCost | None:
    """Fit the cost of a step; None if there are too few samples. `token_s` is a prompt token's, if known.

    Each equation is divided by the root of its steps: what the durations of single steps add to the error
    grows like that.
    """
    if len(samples) < _FEWEST:
        return None
    factors = np.array(
        [(one.steps, one.rows * one.steps, one.prefill_tokens) for one in samples], dtype=float
    )
    took = np.array([one.took_s for one in samples])
    weights = 1 / np.sqrt(factors[:, 0])
    known = np.zeros(len(samples))
    if token_s is not None:
        known = token_s * factors[:, -1]
        factors = factors[:, :-1]
    bounds = _spans(samples)
    within = np.array([_within(one, bounds) for one in samples])
    speeds = np.ones(len(bounds) - 1)
    costs = np.zeros(factors.shape[1])
    for _ in range(_TURNS):
        usual = within @ speeds if speeds.size > 1 else took
        costs = _not_negative(factors * weights[:, None], (usual - known) * weights)
        if speeds.size < _FEWEST_SPANS:
            break
        speeds = _speeds(within, factors @ costs + known, weights)
    step_s, row_s = float(costs[0]), float(costs[1])
    usual = factors @ costs + known
    # The noise of a sum of independent steps grows with the root of their number, as the weights have it.
    left, expected = (within @ speeds - usual) * weights, usual * weights**2
    relative = np.divide(left, expected, out=np.zeros_like(left), where=expected > 0)
    return StepCost(
        step_s=step_s,
        row_s=row_s,
        token_s=float(costs[2]) if token_s is None else token_s,
        noise=float(np.sqrt(np.log1p((relative**2).mean()))),
        mean_rows=float(fmean(one.rows for one in samples)),
        most_rows=max(one.rows for one in samples),
        pace=Pace(bounds=bounds, factors=[float(1 / speed) for speed in speeds]),
    )


def resampled(samples: Sequence[Sample], seed: int) -> Sequence[Sample]:
    """As many samples, drawn with replacement: another log of the same traffic. Seed 0 is the log itself."""
    draw = random.Random(seed)
    return [draw.choice(samples) for _ in samples] if seed else samples


def _spans(samples: Sequence[Sample]) -> list[float]:
    """Bounds of equal spans: with `_PER_SPAN` sequences each, and as long as the usual sequence at least.

    In shorter ones, which part of a sequence's time was slow could not be told.
    """
    begin, end = min(one.begin_s for one in samples), max(one.end_s for one in samples)
    usual_s = median(one.end_s - one.begin_s for one in samples)
    most = (end - begin) / usual_s if usual_s > 0 else 1
    count = max(1, min(len(samples) // _PER_SPAN, int(most)))
    return [begin + (end - begin) * number / count for number in range(count + 1)]


def _within(one: Sample, bounds: Sequence[float]) -> list[float]:
    """The part of a sequence's time that is in each span, in seconds; their sum is `took_s`."""
    parts = [max(0.0, min(one.end_s, end) - max(one.begin_s, begin)) for begin, end in pairwise(bounds)]
    whole = sum(parts)
    return [one.took_s * part / whole for part in parts] if whole else [one.took_s / len(parts)] * len(parts)


def _speeds(within: Matrix, usual: Vector, weights: Vector) -> Vector:
    """The speed in each span, so that the times at these speeds add up to the `usual` ones; 1 on average.

    Neighbouring spans are alike, as far as the sequences do not contradict that.
    """
    spans = within.shape[1]
    seen = within * weights[:, None]
    alike = _ALIKE * float(np.sqrt((seen**2).sum(axis=0).mean())) * np.diff(np.eye(spans), axis=0)
    matrix = np.vstack([seen, alike])
    speeds = np.linalg.lstsq(matrix, np.concatenate([usual * weights, np.zeros(spans - 1)]), rcond=None)[0]
    speeds = np.clip(speeds, 1 / _MOST_PACE, _MOST_PACE)
    total = within.sum(axis=0)
    found: Vector = speeds * float(total.sum() / (total @ speeds))
    return found


def _not_negative(factors: Matrix, took: Vector) -> Vector:
    """Least squares without negative costs: the most negative one is set to 0 until there is none."""
    terms = factors.shape[1]
    used = list(range(terms))
    while used:
        # Scaled columns: rows hardly vary in some logs, and then the shortest solution shares the cost.
        scale = np.maximum(np.abs(factors[:, used]).max(axis=0), 1e-12)
        found = np.linalg.lstsq(factors[:, used] / scale, took, rcond=1e-6)[0] / scale
        if found.min() >= 0:
            costs = np.zeros(terms)
            costs[used] = found
            return costs
        del used[int(found.argmin())]
    return np.zeros(terms)
