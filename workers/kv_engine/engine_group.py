"""The KV engines of one rank, one for each of its KV nodes, as a single engine for its thread.

They compute on one device, so their steps alternate: each call of `step` is a step of the next engine that
has work. Each has its own pool, scheduler and prefix cache.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from shared.errors import BugError
from shared.telemetry.histogram import Histogram
from workers.data_plane.port import Array
from workers.kv_engine.counters import CacheCounters, EngineStats, WorkCounters
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.sequence_spec import SequenceSpec


class EngineGroup:
    """Several engines; a `workers.kv_engine.thread.Engine`.

    Args:
        engines: by node.

    Attributes:
        step_keys: the keys of the sequences in the last step.
    """

    def __init__(self, engines: Mapping[str, KVEngine]) -> None:
        self.engines: Final = dict(engines)
        self.step_keys: tuple[str, ...] = ()
        self._turns = list(self.engines.values())

    @property
    def has_work(self) -> bool:
        """True if a step would compute or admit anything."""
        return any(engine.has_work for engine in self._turns)

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence on its node's engine, which may refuse it (`KVEngine.add`)."""
        self._of(spec.node).add(spec)

    def add_program(self, spec: ProgramSpec) -> None:
        """Queue a run of a program on its node's engine, which may refuse it (`KVEngine.add_program`)."""
        self._of(spec.node).add_program(spec)

    def continue_program(self, given: RunInputs) -> Output | None:
        """Go on with a run of a node's engine (`KVEngine.continue_program`)."""
        return self._of(given.node).continue_program(given)

    def cancel(self, key: str) -> bool:
        """Remove a sequence or a run; return False if it is in no engine (any more)."""
        return any(engine.cancel(key) for engine in self._turns)

    def hold(self, key: str) -> bool:
        """Exclude a sequence from all steps; return False if it is in no engine."""
        return any(engine.hold(key) for engine in self._turns)

    def resume(self, key: str) -> bool:
        """Let a held sequence take part in steps again; return False if it is in no engine."""
        return any(engine.resume(key) for engine in self._turns)

    def feed(self, key: str, items: Array | None, *, ended: bool) -> bool:
        """Give a fed sequence the stream's next items; return False if it is in no engine."""
        return any(engine.feed(key, items, ended=ended) for engine in self._turns)

    def prepare(self) -> bool:
        """Use some idle milliseconds to commit memory of a pool; return True if there is more to do."""
        return any(engine.prepare() for engine in self._turns)

    def step(self) -> list[Output]:
        """Run one step of the engine whose turn it is, as `KVEngine.step`; return nothing without work."""
        engine = next((engine for engine in self._turns if engine.has_work), None)
        if engine is None:
            self.step_keys = ()
            return []
        self._turns.remove(engine)
        self._turns.append(engine)
        try:
            return engine.step()
        finally:
            self.step_keys = engine.step_keys

    def stats(self) -> EngineStats:
        """Return the state of all engines together; other threads may call it."""
        found = [engine.stats() for engine in self.engines.values()]
        numbers = ("forwards", "running", "waiting", "held", "kv_used", "kv_evictable", "kv_total")
        return EngineStats(
            kernels=", ".join(dict.fromkeys(one.kernels for one in found)),
            cache=_sum_of_caches([one.cache for one in found]),
            work=_sum_of_work([one.work for one in found]),
            **{name: sum(getattr(one, name) for one in found) for name in numbers},
        )

    def _of(self, node: str) -> KVEngine:
        if node not in self.engines:
            raise BugError(f"no engine of this rank runs node {node!r}: it has {sorted(self.engines)}")
        return self.engines[node]


def _sum_of_caches(counters: list[CacheCounters]) -> CacheCounters:
    names = [field.name for field in fields(CacheCounters)]
    return CacheCounters(**{name: sum(getattr(one, name) for one in counters) for name in names})


def _sum_of_work(counters: list[WorkCounters]) -> WorkCounters:
    total = WorkCounters()
    for field in fields(WorkCounters):
        values = [getattr(one, field.name) for one in counters]
        is_histogram = isinstance(values[0], Histogram)
        setattr(total, field.name, _sum_of_histograms(values) if is_histogram else sum(values))
    return total


def _sum_of_histograms(histograms: list[Histogram]) -> Histogram:
    total = Histogram.over(histograms[0].bounds)
    for one in histograms:
        total.counts = [a + b for a, b in zip(total.counts, one.counts, strict=True)]
        total.sum += one.sum
    return total
