"""Simulated ranks: each executes orders with the recorded work of the same step. Pure.

The nodes of an order run one after the other, or at once if they did when it was recorded: then their
durations did not fit into the time of the order. What none of them took follows their end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from dalsegno.what_if.engines import SimulatedEngine, SimulatedNode
from dalsegno.what_if.recorded_load import Part, Tokens
from shared.events import NodeReady

Report = Callable[[NodeReady, Part], None]


@dataclass(slots=True, kw_only=True)
class _Job:
    order: NodeReady
    part: Part
    removals: list[Callable[[], None]] = field(default_factory=list)
    left: int = 0
    is_stopped: bool = False


class SimulatedRank:
    """One rank.

    Args:
        engines: of its nodes that have one.
        node_of: makes a node that is no engine's, at its first call.
        pause: does something after so many seconds.
        report: is called with each order that is done.
        on_first: is called with a request at the first token of each of its sequences.
    """

    def __init__(
        self,
        engines: Mapping[str, SimulatedEngine],
        *,
        node_of: Callable[[str], SimulatedNode],
        pause: Callable[[float, Callable[[], None]], None],
        report: Report,
        on_first: Callable[[str], None],
    ) -> None:
        self.engines = engines
        self._node_of = node_of
        self._nodes: dict[str, SimulatedNode] = {}
        self._pause = pause
        self._report = report
        self._on_first = on_first
        self._jobs: dict[tuple[str, int, int], _Job] = {}

    def take(self, order: NodeReady, part: Part) -> None:
        """Execute an order as `part` was executed."""
        job = _Job(order=order, part=part)
        self._jobs[str(order.request_id), order.attempt, order.index] = job
        calls: list[Callable[[Callable[[], None]], None]] = [
            *(partial(self._call, job, node, took_s) for node, took_s in part.others.items()),
            *(partial(self._generate, job, node, tokens) for node, tokens in part.sequences.items()),
        ]
        if part.is_chain or not calls:
            self._chain(job, calls)
            return
        job.left = len(calls)
        for call in calls:
            call(partial(self._one_less, job))

    def stop(self, request_id: str, attempt: int, index: int) -> None:
        """Stop an order."""
        job = self._jobs.pop((request_id, attempt, index), None)
        if job is not None:
            job.is_stopped = True
            for remove in job.removals:
                remove()

    def _chain(self, job: _Job, calls: list[Callable[[Callable[[], None]], None]]) -> None:
        if job.is_stopped:
            return
        if calls:
            calls[0](lambda: self._chain(job, calls[1:]))
        else:
            self._pause(job.part.overhead_s, partial(self._done, job))

    def _one_less(self, job: _Job) -> None:
        job.left -= 1
        if not job.left:
            self._chain(job, [])

    def _call(self, job: _Job, node: str, took_s: float, on_end: Callable[[], None]) -> None:
        if node not in self._nodes:
            self._nodes[node] = self._node_of(node)
        self._nodes[node].call(took_s, on_end)

    def _generate(self, job: _Job, node: str, tokens: Tokens, on_end: Callable[[], None]) -> None:
        order = job.order
        # Of a shortened answer, the order allows fewer tokens than were recorded.
        limits = [int(walk.args["max_tokens"]) for walk in order.walks if walk.args.get("max_tokens")]
        share = min([1.0, *(limit / max(tokens.generated, 1) for limit in limits)])
        removal = self.engines[node].add(
            f"{order.request_id}.{order.attempt}.{order.index}",
            Tokens(prompt=tokens.prompt, generated=ceil(tokens.steps * share)),
            priority=order.priority,
            deadline_ns=order.deadline_ns,
            tenant=order.tenant,
            on_first=partial(self._on_first, str(order.request_id)),
            on_end=on_end,
        )
        job.removals.append(removal)

    def _done(self, job: _Job) -> None:
        order = job.order
        if self._jobs.pop((str(order.request_id), order.attempt, order.index), None) is not None:
            self._report(order, job.part)
