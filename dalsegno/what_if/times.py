"""How long recorded requests would take under another configuration: simulated, after a calibration. Pure.

    recorded work ──> cost of a step ──> closed loop, recorded configuration ──> held against the recording
                                    └──> closed loop, other configuration, once per seed ──> interval

The calibration is part of each result: the error of latency (p50, p90) and of throughput when the recorded
run itself is simulated. Above `LIMIT` there is no result. A measure of first tokens whose own error is above
it is left out.

Seed 0 has the costs that fit all recorded work best. Each further seed has those of a resampled log, so that
the interval shows how well the log determines the costs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean
from typing import Final

import msgspec

from conductor.core.schedule import Deployment
from configs.deployment import DeploymentConfig
from dalsegno.what_if import cost_model
from dalsegno.what_if.closed_loop import ClosedLoop, Simulated
from dalsegno.what_if.cost_model import StepCost
from dalsegno.what_if.engines import EngineSize
from dalsegno.what_if.recorded_load import Asked, Load
from models.base import ModelGraph
from shared.errors import ClientError
from shared.quantile import quantile
from shared.subjects import Subjects
from workers import settings

LIMIT: Final = 0.10
"""The largest calibration error of a result that is given."""
_EVENT_BYTES: Final = 1 << 30
_TOKEN_SHARES: Final = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
"""Costs of a prompt's token that are tried, in shares of the cost of a usual step."""
_FINER: Final = 1.7
_SEARCHED: Final = 300
"""The requests with which costs are tried."""
_FEW_ROWS: Final = 0.5
"""The range of recorded rows, in shares of their mean, below which the cost of a row is hardly known."""
_GATING: Final = ("latency p50, s", "latency p90, s", "throughput")
"""The measures whose error decides whether the simulation is calibrated."""


class NotCalibratedError(ClientError):
    """The simulation of the recorded run is not close enough to it."""

    code = "not_calibrated"

    def __init__(self, message: str, calibration: "Mapping[str, Measure] | None" = None) -> None:
        super().__init__(message)
        self.calibration = dict(calibration or {})


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of the recorded run, and of its simulation.

    `error` is relative; None without a recorded value.
    """

    recorded: float | None
    simulated: float | None
    error: float | None


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """One measure under the other configuration: of seed 0, and the lowest and highest of all seeds."""

    value: float | None
    low: float | None
    high: float | None


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    Attributes:
        calibration, predicted: by measure; those whose error is too large are not predicted.
        baseline: of a trace, its measures with the recorded configuration; empty without one.
        costs: of an engine's step, by node.
        outcomes: how the requests ended, in the recording and in the simulation with seed 0.
        requests: by request, seconds recorded, simulated as recorded, and under the other configuration.
    """

    calibration: dict[str, Measure]
    predicted: dict[str, Predicted]
    baseline: dict[str, float | None]
    costs: dict[str, dict[str, float]]
    outcomes: dict[str, dict[str, int]]
    requests: dict[str, dict[str, float | None]]
    seeds: int
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A configuration, and the deployment that it makes."""

    config: DeploymentConfig
    deployment: Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """The subjects and the graphs that both simulations use."""

    subjects: Subjects
    graph_of: Callable[[str], ModelGraph]


def predict(
    load: Load,
    asked: Sequence[Asked],
    recorded: Side,
    other: Side,
    around: Around,
    *,
    seeds: int,
    instead: Sequence[Asked] | None = None,
) -> Times:
    """Simulate the recorded configuration, then the other one.

    Args:
        load: the recorded traffic.
        asked: the requests to repeat.
        recorded: the configuration of the recording.
        other: the configuration to try.
        around: the subjects, and the graphs of families.
        seeds: how many simulations of the other configuration to make.
        instead: other requests, those of a trace; the recorded ones only calibrate then.

    Raises:
        NotCalibratedError: the log has no work, or the simulation of the recorded run is too far from it.
        UnknownWorkError: a step has to be simulated whose work the recording does not have.
        ConfigError: a configuration has invalid settings of engines.
    """
    if not load.has_work:
        raise NotCalibratedError(
            "not calibrated: the log has no `work` in its walk.completed events, because an older version "
            "wrote it: record traffic with this version first"
        )
    for side in (recorded, other):
        drafts = settings.of(side.config)
        if drafts.speculative_tokens and not drafts.drafts_have_to_pay:
            raise NotCalibratedError(
                "not calibrated: model_kwargs.speculative_tokens is simulated only if it is auto, with the "
                "accepted drafts that were recorded"
            )
    costs, same = _learned(load, asked, recorded, around)
    calibration = _calibration(asked, same)
    worst = max(
        (one.error for name, one in calibration.items() if name in _GATING and one.error is not None),
        default=None,
    )
    if worst is None:
        raise NotCalibratedError("not calibrated: no recorded request has finished", calibration)
    if worst > LIMIT:
        raise NotCalibratedError(
            f"not calibrated: the simulation of the recorded run is wrong by {worst:.0%}; "
            f"expected at most {LIMIT:.0%}",
            calibration,
        )
    baseline: dict[str, float | None] = {}
    if instead is not None:
        asked, same = instead, _simulate(load, instead, recorded, costs, around)
        baseline = _measures_of(same)
    runs = [
        _simulate(load, asked, other, _costs(load, seed, _shares(costs)), around, seed)
        for seed in range(seeds)
    ]
    first = runs[0]
    measures = [_measures_of(run) for run in runs]
    return Times(
        calibration=calibration,
        predicted={
            name: _interval([one[name] for one in measures])
            for name in measures[0]
            if (error := calibration[name].error) is not None and error <= LIMIT
        },
        baseline=baseline,
        costs={node: _as_plain(cost) for node, cost in costs.items()},
        outcomes={
            "recorded": Counter(
                one.outcome for one in (asked if instead is None else same.requests.values())
            ),
            "simulated": Counter(one.outcome for one in first.requests.values()),
        },
        requests={
            one.id: {
                "recorded": one.took_s if one.end_ns else None,
                "as recorded": same.requests[one.id].took_s,
                "otherwise": first.requests[one.id].took_s,
            }
            for one in asked
        },
        seeds=seeds,
        notes=_notes(load, costs, first),
    )


def chosen(load: Load, config: str, last: int | None) -> tuple[list[Asked], list[str]]:
    """The requests that are repeated, those of one configuration; and why others are not."""
    ended = [one for one in load.requests if one.outcome in {"finished", "cancelled", "rejected"}]
    kept = [one for one in ended if one.config in {"", config}]
    notes = []
    if failed := len(load.requests) - len(ended):
        notes.append(f"{failed:,} requests that failed or have not ended are left out")
    if others := len(ended) - len(kept):
        notes.append(f"{others:,} requests that another configuration admitted are left out")
    return (kept[-last:] if last else kept), notes


# ---- costs ---------------------------------------------------------------------------------------------


def _learned(
    load: Load, asked: Sequence[Asked], recorded: Side, around: Around
) -> tuple[dict[str, StepCost], Simulated]:
    """Learn the cost of a step, and simulate the recorded run with it.

    The work of sequences hardly tells what a prompt's token costs where most steps have about as many of
    them: the engine limits them. But how long first tokens took tells: so of several costs of a prompt's
    token, in shares of a step, that one is taken with which the simulated run is closest to the recorded one.
    """
    fits = _costs(load, 0, {})
    if few := sorted(set(load.samples) - set(fits)):
        raise NotCalibratedError(
            f"not calibrated: too few sequences of {', '.join(few)} were recorded to learn the cost of a step"
        )
    part = asked[:_SEARCHED]

    def distance(share: float | None) -> float:
        costs = fits if share is None else _costs(load, 0, dict.fromkeys(fits, share))
        return _distance(part, _simulate(load, part, recorded, costs, around))

    best, least = None, distance(None)
    if fits:
        for share in _TOKEN_SHARES:
            if (found := distance(share)) < least:
                best, least = share, found
        if best:
            for share in (best / _FINER, best * _FINER):
                if (found := distance(share)) < least:
                    best, least = share, found
    costs = fits if best is None else _costs(load, 0, dict.fromkeys(fits, best))
    return costs, _simulate(load, asked, recorded, costs, around)


def _costs(load: Load, seed: int, shares: Mapping[str, float]) -> dict[str, StepCost]:
    """The cost of a step of each node; `shares` has the cost of a prompt's token in shares of a step."""
    found: dict[str, StepCost] = {}
    for node, samples in load.samples.items():
        drawn = cost_model.resampled(samples, seed)
        cost = cost_model.fitted(drawn)
        if cost is not None and node in shares:
            usual_s = cost.of(round(cost.mean_rows), 0)
            cost = cost_model.fitted(drawn, shares[node] * usual_s)
        if cost is not None:
            found[node] = cost
    return found


def _shares(costs: Mapping[str, StepCost]) -> dict[str, float]:
    usual = {node: cost.of(round(cost.mean_rows), 0) for node, cost in costs.items()}
    return {node: cost.token_s / usual[node] for node, cost in costs.items() if usual[node]}


def _distance(asked: Sequence[Asked], run: Simulated) -> float:
    """The mean relative difference of the times of requests, to the first token and to the end."""
    found: list[float] = []
    for one in asked:
        simulated = run.requests[one.id]
        for was, now in ((one.took_s, simulated.took_s), (one.first_s, simulated.first_s)):
            if one.outcome == "finished" and was and now:
                found.append(abs(log(now / was)))
    return fmean(found) if found else 0.0


def _simulate(
    load: Load,
    asked: Sequence[Asked],
    side: Side,
    costs: Mapping[str, StepCost],
    around: Around,
    seed: int = 0,
) -> Simulated:
    engine = settings.of(side.config)
    limits = msgspec.structs.replace(side.deployment.limits, max_event_bytes=_EVENT_BYTES)

    def size(rank: int) -> EngineSize:
        joined = load.joins.get(rank)
        kv_tokens = side.config.kv_tokens or (joined.kv_tokens if joined is not None else 0)
        device = joined.device.partition(":")[0] if joined is not None else "cpu"
        return EngineSize(
            settings=engine, device=device, kv_tokens=kv_tokens, max_positions=side.config.max_seq_len
        )

    loop = ClosedLoop(
        load,
        asked,
        msgspec.structs.replace(side.deployment, limits=limits),
        size=size,
        costs=costs,
        subjects=around.subjects,
        graph_of=around.graph_of,
        seed=seed,
    )
    return loop.run()


# ---- measures ------------------------------------------------------------------------------------------


def _calibration(asked: Sequence[Asked], same: Simulated) -> dict[str, Measure]:
    recorded, simulated = _measures_of_recording(asked), _measures_of(same)
    return {
        name: Measure(recorded=was, simulated=simulated[name], error=_error(was, simulated[name]))
        for name, was in recorded.items()
    }


def _error(recorded: float | None, simulated: float | None) -> float | None:
    if not recorded:
        return None
    return 1.0 if simulated is None else abs(simulated - recorded) / recorded


def _measures_of_recording(asked: Sequence[Asked]) -> dict[str, float | None]:
    finished = [one for one in asked if one.outcome == "finished"]
    begin_ns = min((one.at_ns for one in asked), default=0)
    end_ns = max((one.end_ns for one in finished), default=begin_ns)
    return _measures(
        [one.took_s for one in finished],
        [one.first_s for one in finished],
        sum(one.tokens for one in finished),
        (end_ns - begin_ns) / 1e9,
    )


def _measures_of(run: Simulated) -> dict[str, float | None]:
    finished = [one for one in run.requests.values() if one.outcome == "finished"]
    begin_s = min((one.at_s for one in run.requests.values()), default=0.0)
    end_s = max((one.end_s or 0.0 for one in finished), default=begin_s)
    return _measures(
        [one.took_s for one in finished if one.took_s is not None],
        [one.first_s for one in finished],
        sum(one.tokens for one in finished),
        end_s - begin_s,
    )


def _measures(
    took_s: Sequence[float], first_s: Sequence[float | None], tokens: int, seconds: float
) -> dict[str, float | None]:
    firsts = [one for one in first_s if one is not None]
    done = tokens or len(took_s)
    return {
        "latency p50, s": quantile(took_s, 0.5),
        "latency p90, s": quantile(took_s, 0.9),
        "first token p50, s": quantile(firsts, 0.5),
        "first token p90, s": quantile(firsts, 0.9),
        "throughput": done / seconds if seconds > 0 and done else None,
    }


def _interval(values: Sequence[float | None]) -> Predicted:
    known = [one for one in values if one is not None]
    return Predicted(value=values[0], low=min(known, default=None), high=max(known, default=None))


def _as_plain(cost: StepCost) -> dict[str, float]:
    return {"step_s": cost.step_s, "row_s": cost.row_s, "token_s": cost.token_s}


def _notes(load: Load, costs: Mapping[str, StepCost], run: Simulated) -> list[str]:
    notes = [
        "requests come when they came, also those of clients that wait for an answer before they ask again"
    ]
    if load.losses:
        notes.append(f"{load.losses:,} workers were lost in the recording; in the simulation none is")
    if run.lent:
        name, donor = next(iter(run.lent.items()))
        notes.append(
            f"{len(run.lent):,} requests have no recorded work, and were given that of the nearest one, for "
            f"example {name} that of {donor}"
        )
    for node, samples in load.samples.items():
        spread = [one.rows for one in samples]
        if max(spread) - min(spread) < _FEW_ROWS * fmean(spread):
            notes.append(
                f"the steps of {node} had about as many rows throughout the recording, so that the cost of a "
                "row is hardly known"
            )
    rows = run.rows / run.steps if run.steps else 0.0
    most = max((cost.most_rows for cost in costs.values()), default=0.0)
    if rows > most:
        notes.append(
            f"steps have {rows:.1f} rows on average, and at most {most:.1f} were recorded: their cost is "
            "extrapolated"
        )
    return notes
