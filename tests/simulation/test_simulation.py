"""Histories by the hundred: whatever is lost, doubled, late or killed, the invariants hold.

`SIMULATION_SEEDS` sets how many (`make soak`: thousands). That the invariants can fail is shown too:
each rule of the design that is taken away is missed by one of them. (The epoch fence is not among these:
what a deposed conductor decides is what its successor decides, from the same log; the fence is the second
lock, for conductors of different versions, and is tested in `tests.conductor.core.test_cluster`.)
"""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conductor.core import react
from conductor.core.cluster import Cluster, Folded
from conductor.core.request import Request, World
from shared.events import Event, OutputChunk, OutputFence, WalkCompleted, WalkFailed, WorkerJoined
from shared.fence import EpochFence
from shared.transcript import Transcript
from tests.simulation.invariants import check
from tests.simulation.simulator import Plan, SimConductor, Simulation, text_of
from workers.inbox import Inbox

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "500"))
BATCHES = 10


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_invariants_hold_in_every_history(batch: int) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        check(Simulation(seed).run())


def test_the_same_seed_is_the_same_history() -> None:
    assert Simulation(3).run().records == Simulation(3).run().records


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_from_any_prefix_of_the_log_the_same_end_is_reached(seed: int) -> None:
    whole = Simulation(seed).run()
    quiet = Plan(requests=whole.plan.requests, places=whole.plan.places, faulty_steps=0)
    for cut in range(0, len(whole.records), max(1, len(whole.records) // 8)):
        again = Simulation(seed, quiet, whole.records[:cut]).run()
        if whole.plan.max_attempts > 100:
            check(again)
        for request_id, tracks in again.clients.text.items():
            text = tracks.get("", "")
            assert text_of(request_id).startswith(text)
            assert text.startswith(_released(whole, request_id, cut))


def _released(sim: Simulation, request_id: str, cut: int) -> str:
    """What a client had read when the log was `cut` records long: it must never be contradicted."""
    fence, transcript, text = EpochFence(), Transcript(), ""
    for event in sim.decoded[:cut]:
        counts = fence.admits(event)
        if counts and isinstance(event, OutputChunk | OutputFence) and event.request_id == request_id:
            text += "".join(chunk.text for chunk in transcript.fold(event))
    return text


# ---- the checker can fail ------------------------------------------------------------------------


def no_regard_for_attempts(patch: pytest.MonkeyPatch) -> None:
    """Whatever is reported is taken for a report of the step at hand."""
    fact = react.Reactor.fact

    def careless(
        self: react.Reactor, request: Request, event: react.Fact, data: bytes, world: World
    ) -> react.Reaction:
        if isinstance(event, WalkCompleted | WalkFailed) and request.running and request.running[0].lives:
            step = request.running[0]
            life = step.lives[event.rank]
            event = msgspec.structs.replace(
                event, index=step.index, attempt=request.attempt, incarnation=life
            )
        return fact(self, request, event, data, world)

    patch.setattr(react.Reactor, "fact", careless)


def no_output_fence(patch: pytest.MonkeyPatch) -> None:
    fold = Transcript.fold

    def unfenced(self: Transcript, event: OutputChunk | OutputFence) -> list[OutputChunk]:
        return [] if isinstance(event, OutputFence) else fold(self, event)

    patch.setattr(Transcript, "fold", unfenced)


def no_handing_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "outstanding", lambda _: [])


def no_memory_of_orders(patch: pytest.MonkeyPatch) -> None:
    ready = Inbox._ready

    def forgetful(self: Inbox, order: object) -> object:
        self._requests.clear()
        return ready(self, order)  # type: ignore[arg-type]

    patch.setattr(Inbox, "_ready", forgetful)


def no_memory_of_lives(patch: pytest.MonkeyPatch) -> None:
    kind: type[Event] = WorkerJoined
    joined = Cluster.HANDLERS[kind]

    def forgetful(self: Cluster, *args: Any) -> Folded:
        self._lives.clear()
        return joined(self, *args)

    patch.setitem(Cluster.HANDLERS, kind, forgetful)


def no_sending_again(patch: pytest.MonkeyPatch) -> None:
    transmit = SimConductor.transmit

    def careless(self: SimConductor) -> None:
        self.outbox = [entry for entry in self.outbox if not entry.sent]
        transmit(self)

    patch.setattr(SimConductor, "transmit", careless)


@pytest.mark.parametrize(
    "sabotage",
    [
        no_regard_for_attempts,
        no_output_fence,
        no_handing_over,
        no_memory_of_orders,
        no_memory_of_lives,
        no_sending_again,
    ],
)
def test_a_rule_taken_away_is_noticed(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, StopIteration)):
        _check_seeds(400)


def _check_seeds(count: int) -> None:
    for seed in range(count):
        check(Simulation(seed).run())
