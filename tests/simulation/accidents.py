"""Implementation of every accident of `tests.simulation.plan.RATES`.

Each is a function that applies the accident to the simulation. It returns a description (empty if it was
already described), or None if the accident is not possible now.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shared.events import Inputs, Params, RequestSubmitted, encode
from tests.conductor.script import SUBJECTS

if TYPE_CHECKING:
    from tests.simulation.clients import Client
    from tests.simulation.process import Process
    from tests.simulation.simulator import Simulation
    from tests.simulation.workers import Worker

T = TypeVar("T")
Accident = Callable[["Simulation"], str | None]
NONSENSE: Final = (b"", b"\x00\x01", b"{", b'{"model": 7}', b"\x81\xa4type\xa7unknown", b"\xff" * 40)


def _one(chance: random.Random, of: Sequence[T]) -> T | None:
    return chance.choice(of) if of else None


def _up(processes: Sequence[Any]) -> list[Any]:
    return [one for one in processes if one.is_alive and not one.is_frozen]


# ---- to a process --------------------------------------------------------------------------------


def _dies(group: str) -> Accident:
    def die(sim: "Simulation") -> str | None:
        process: Process | None = _one(sim.random, _up(getattr(sim, group)))
        if process is None:
            return None
        process.end("dies")
        return ""  # it said so itself

    return die


def _freezes(group: str) -> Accident:
    def freeze(sim: "Simulation") -> str | None:
        process: Process | None = _one(sim.random, _up(getattr(sim, group)))
        if process is None:
            return None
        process.is_frozen = True
        pause_ms = sim.random.choice([20, 300, 4000])

        def thaw() -> None:
            process.is_frozen = False

        sim.later(pause_ms, thaw)
        return f"{process} is frozen for {pause_ms} ms"

    return freeze


def _is_cut_off(group: str) -> Accident:
    def cut(sim: "Simulation") -> str | None:
        process: Process | None = _one(sim.random, _up(getattr(sim, group)))
        if process is None or process.line.is_cut:
            return None
        process.line.is_cut = True
        pause_ms = sim.random.choice([20, 300, 4000])

        def heal() -> None:
            process.line.is_cut = False

        sim.later(pause_ms, heal)
        return f"{process} is cut off from the log for {pause_ms} ms"

    return cut


def worker_hangs(sim: "Simulation") -> str | None:
    """Block a worker's main loop; its heartbeats continue."""
    worker: Worker | None = _one(sim.random, [w for w in _up(sim.workers) if w.hung_ms is None])
    if worker is None:
        return None
    worker.hung_ms = sim.now_ms
    pause_ms = sim.random.choice([300, 5000])

    def go_on() -> None:
        worker.hung_ms = None

    sim.later(pause_ms, go_on)
    return f"{worker} hangs for {pause_ms} ms"


def worker_leaves(sim: "Simulation") -> str | None:
    worker: Worker | None = _one(sim.random, [w for w in _up(sim.workers) if not w.is_leaving])
    if worker is None:
        return None
    worker.leave()
    return f"{worker} is told to leave"


def worker_is_replaced(sim: "Simulation") -> str | None:
    """Another process takes the rank of a live worker."""
    worker: Worker | None = _one(sim.random, [w for w in _up(sim.workers) if sim.present(w.rank) is w])
    if worker is None:
        return None
    sim.spawn_worker(worker.rank)
    return f"{worker} is taken for dead, and another process takes its rank"


def worker_is_given_up(sim: "Simulation") -> str | None:
    """A conductor, the leader or a former one, believes that a worker is dead."""
    conductor = _one(sim.random, [c for c in _up(sim.conductors) if c.led and not c.line.is_full])
    if conductor is None:
        return None
    rank = sim.random.choice(sim.ranks)
    if not conductor.give_up(rank, "it was not heard, or so it seemed"):
        return None
    return f"{conductor} gives rank {rank} up"


def checkpoint_is_replaced(sim: "Simulation") -> str | None:
    """Processes that start from now on load another checkpoint."""
    sim.checkpoint += 1
    return f"the checkpoint is replaced by number {sim.checkpoint}"


def conductor_claims(sim: "Simulation") -> str | None:
    """A follower believes that there is no leader."""
    conductor = _one(sim.random, [c for c in _up(sim.conductors) if not c.is_leading])
    if conductor is None:
        return None
    conductor.leader.set_absent("it seems so")
    return f"{conductor} thinks that nobody leads"


def deadline_is_early(sim: "Simulation") -> str | None:
    """A leader's clock is ahead."""
    conductor = _one(sim.random, [c for c in _up(sim.conductors) if c.is_leading and not c.line.is_full])
    limit = _one(sim.random, conductor.cluster.deadlines()) if conductor is not None else None
    if conductor is None or limit is None or limit.at_ns <= sim.clock_ns():
        return None
    conductor.say_passed(limit)
    return f"{conductor} says too early that a limit of {limit.request_id} is over"


# ---- to clients ----------------------------------------------------------------------------------


def _reading(sim: "Simulation") -> "Client | None":
    return _one(sim.random, [client for client in sim.clients if client.answer is not None])


def client_loses_its_line(sim: "Simulation") -> str | None:
    client = _reading(sim)
    if client is None:
        return None
    client.lose_line()
    return f"{client} loses its line"


def client_reads_nothing(sim: "Simulation") -> str | None:
    client = _reading(sim)
    if client is None or client.is_stalled:
        return None
    client.is_stalled = True

    def go_on() -> None:
        client.is_stalled = False

    sim.later(sim.random.randint(50, 800), go_on)
    return f"{client} reads nothing for a while"


def client_leaves(sim: "Simulation") -> str | None:
    client = _reading(sim)
    if client is None:
        return None
    client.leave()
    return f"{client} leaves"


def client_cancels(sim: "Simulation") -> str | None:
    """Cancel any request, possibly one that has ended, at any gateway."""
    gateway = _one(sim.random, [g for g in _up(sim.gateways) if not g.line.is_full])
    client = _one(sim.random, sim.clients)
    if gateway is None or client is None:
        return None
    gateway.cancel(client.request_id, "somebody said so")
    return f"{client.request_id} is to be cancelled"


def client_asks_again(sim: "Simulation") -> str | None:
    client = _one(sim.random, [c for c in sim.clients if c.reading.is_over and not c.has_left])
    if client is None:
        return None
    client.ask_again()
    return f"{client} asks again, from the beginning"


def stranger_takes_an_id(sim: "Simulation") -> str | None:
    """A client submits another request under an existing id, or the same request again."""
    known = [c.request_id for c in sim.clients if sim.log.last(SUBJECTS.request(c.request_id))]
    request_id = _one(sim.random, known)
    if request_id is None or sim.log.is_full or not sim.log.is_up:
        return None
    is_same = sim.random.random() < 0.3
    sim.strangers += 1
    event = RequestSubmitted(
        id=f"stranger.{sim.strangers}",
        writer="stranger",
        request_id=request_id,
        model="demo",
        inputs=Inputs(text=sim.kind_of(request_id) if is_same else "something else"),
        params=Params(max_tokens=6),
    )
    sim.log.append(SUBJECTS.request(request_id), encode(event))
    return f"a stranger submits {request_id} {'again' if is_same else 'as another request'}"


def stranger_writes_nonsense(sim: "Simulation") -> str | None:
    if sim.log.is_full or not sim.log.is_up:
        return None
    sim.strangers += 1
    request_id = sim.random.choice([f"nonsense{sim.strangers}", *(c.request_id for c in sim.clients)])
    subject = sim.random.choice([SUBJECTS.request, SUBJECTS.control])(request_id)
    sim.log.append(subject, sim.random.choice(NONSENSE))
    return f"a stranger writes nonsense to {subject}"


# ---- to the log ----------------------------------------------------------------------------------


def _go_down(sim: "Simulation") -> int:
    """Kill the server with everything in flight; return for how long."""
    sim.log.is_up = False
    for process in sim.processes:
        process.line.go_down(loses=not process.is_frozen)
    down_ms = sim.random.choice([5, 100, 2500])

    def come_up() -> None:
        sim.log.is_up = True

    sim.later(down_ms, come_up)
    return down_ms


def log_restarts(sim: "Simulation") -> str | None:
    if not sim.log.is_up:
        return None
    return f"the log is down for {_go_down(sim)} ms"


def log_loses_its_tail(sim: "Simulation") -> str | None:
    if not sim.log.is_up or not sim.log.last_seq:
        return None
    lost = sim.random.choice([1, 5, sim.log.last_seq // 2])
    keep = max(0, sim.log.last_seq - lost)
    down_ms = _go_down(sim)
    sim.go_back(keep, is_new=False)
    return f"the log is down for {down_ms} ms and ends at {keep} then"


def log_is_made_anew(sim: "Simulation") -> str | None:
    if not sim.log.is_up:
        return None
    down_ms = _go_down(sim)
    sim.go_back(0, is_new=True)
    return f"the log is down for {down_ms} ms and empty then"


def log_is_full(sim: "Simulation") -> str | None:
    if sim.log.is_full:
        return None
    sim.log.is_full = True
    full_ms = sim.random.choice([20, 300, 2500])

    def set_max_messages() -> None:
        sim.log.is_full = False

    sim.later(full_ms, set_max_messages)
    return f"the log is full for {full_ms} ms"


def log_is_slow(sim: "Simulation") -> str | None:
    if sim.log.is_slow:
        return None
    sim.log.is_slow = True

    def hurry() -> None:
        sim.log.is_slow = False

    sim.later(200, hurry)
    return "the log is slow for 200 ms"


def clock_goes_back(sim: "Simulation") -> str | None:
    sim.log.skew_ns = sim.random.choice([-3, -1, 0, 1]) * 1_000_000_000
    return f"the log's clock is off by {sim.log.skew_ns // 1_000_000} ms from here on"


# ---- to what is kept -----------------------------------------------------------------------------


def tensor_is_lost(sim: "Simulation") -> str | None:
    """Remove a stored tensor without a cause."""
    holders = [w for w in _up(sim.workers) if w.incarnation is not None and w.jobs]
    worker: Worker | None = _one(sim.random, holders)
    if worker is None:
        return None
    key = sim.random.choice(sorted(worker.jobs))
    worker.lost_tensors.add(key.request_id)
    return f"{worker} loses the tensors of {key.request_id}"


def snapshot_is_lost(sim: "Simulation") -> str | None:
    if sim.snapshot is None:
        return None
    sim.snapshot = None
    return "the snapshot is deleted"


ACCIDENTS: Final[dict[str, Accident]] = {
    "worker dies": _dies("workers"),
    "worker freezes": _freezes("workers"),
    "worker hangs": worker_hangs,
    "worker leaves": worker_leaves,
    "worker is cut off": _is_cut_off("workers"),
    "worker is replaced": worker_is_replaced,
    "worker is given up": worker_is_given_up,
    "checkpoint is replaced": checkpoint_is_replaced,
    "conductor dies": _dies("conductors"),
    "conductor freezes": _freezes("conductors"),
    "conductor is cut off": _is_cut_off("conductors"),
    "conductor claims": conductor_claims,
    "deadline is early": deadline_is_early,
    "gateway dies": _dies("gateways"),
    "gateway freezes": _freezes("gateways"),
    "gateway is cut off": _is_cut_off("gateways"),
    "client loses its line": client_loses_its_line,
    "client reads nothing": client_reads_nothing,
    "client cancels": client_cancels,
    "client leaves": client_leaves,
    "client asks again": client_asks_again,
    "stranger takes an id": stranger_takes_an_id,
    "stranger writes nonsense": stranger_writes_nonsense,
    "log restarts": log_restarts,
    "log is full": log_is_full,
    "log is slow": log_is_slow,
    "log's clock goes back": clock_goes_back,
    "log loses its tail": log_loses_its_tail,
    "log is made anew": log_is_made_anew,
    "tensor is lost": tensor_is_lost,
    "snapshot is lost": snapshot_is_lost,
}
