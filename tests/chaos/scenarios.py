"""Faults beyond single points: several roles at once, a server that is away, a request that kills.

`SCENARIOS` run on the deployment of the matrix; `OTHERS` start their own.
"""

import asyncio
import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import httpx
import msgspec

from shared.log.nats import jetstream
from shared.log.nats.durability import StreamPolicy
from shared.subjects import Subjects
from tests.chaos.checker import Finding
from tests.chaos.deployment import Deployment, Nats, Shape, deployed
from tests.chaos.disturbances import ACTIONS, after_events, at_once
from tests.chaos.questions import GREEDY, LEAVER, SPOKEN, Question
from tests.chaos.rawlog import STREAM, Record
from tests.chaos.rounds import Disturbance, Outcome, Rounds, Undisturbed
from tests.chaos.seen import Seen
from tests.shared.log.cluster import Cluster, Member
from tests.tiny import poison, tiny_checkpoint
from tests.tiny.orpheus import tiny_orpheus

AWAY_S: Final = 5.0
"""How long a server is away, and a role that is not started again."""
UNDER_WAY: Final = 60
"""So many events have passed when something happens: answers have begun, and few have ended."""
_ANSWER_S: Final = 8.0
"""For so long a gateway may wait for the log before it says that there is none."""
_HUNG_S: Final = 3.0
_STORMS: Final = 20
_GUSTS: Final = 6
_MANY: Final = 50
"""Attempts: in a storm, workers die that no request has killed."""
_SPEAKING: Final = 40
"""So many events have passed when there is something to hear."""
KILLS: Final = 100
LOAD: Final = 2
"""So many times are all questions asked at the same time."""


@dataclass(slots=True)
class Notes:
    """A scenario's own observations: remarks for the report, and violations.

    Attributes:
        at_s: the time of the fault, by the wall clock.
    """

    said: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    at_s: float = 0.0

    def find(self, kind: str, message: str) -> None:
        self.findings.append(Finding(kind=kind, request_id="", message=message))


class Victim(Protocol):
    """A process that can receive signals and be kept from restarting: a role, or nats-server."""

    may_run: asyncio.Event

    def signal(self, number: signal.Signals) -> None: ...


Happening: TypeAlias = Callable[[Deployment, Notes], Disturbance]
Doing: TypeAlias = Callable[[Deployment, Notes], Awaitable[None]]
Judge: TypeAlias = Callable[[Outcome, Notes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario on the deployment of the matrix.

    Attributes:
        times: the number of rounds.
        judges: additional checks.
    """

    name: str
    happens: Happening
    times: int = 1
    judges: Sequence[Judge] = ()

    async def run(self, deployment: Deployment, rounds: Rounds, undisturbed: Undisturbed) -> Outcome:
        """Run all its rounds, as one outcome."""
        outcomes = []
        for _ in range(self.times):
            await deployment.wait_until_ready()
            notes = Notes()
            outcome = await rounds.round(
                self.name,
                list(undisturbed.questions) * LOAD,
                expected=undisturbed.expected,
                disturb=self.happens(deployment, notes),
            )
            outcomes.append(judged(outcome, notes, self.judges))
        return together(outcomes)


def judged(outcome: Outcome, notes: Notes, judges: Sequence[Judge]) -> Outcome:
    """The outcome with the additional observations."""
    for judge in judges:
        judge(outcome, notes)
    outcome.findings += notes.findings
    outcome.note = "; ".join(notes.said)
    return outcome


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Several rounds as one outcome."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    failed = next((one for one in outcomes if not one.survived), first)
    return Outcome(
        name=first.name,
        parts=outcomes,
        reached=all(one.reached for one in outcomes),
        findings=[finding for one in outcomes for finding in one.findings],
        stall_s=max(one.stall_s for one in outcomes),
        undisturbed_s=first.undisturbed_s,
        clients=sum(one.clients for one in outcomes),
        resumed=sum(one.resumed for one in outcomes),
        attempts=sum(one.attempts for one in outcomes),
        took_s=sum(one.took_s for one in outcomes),
        note=f"{sum(one.survived for one in outcomes)} of {len(outcomes)} rounds",
        records=failed.records,
        seen=failed.seen,
    )


# ---- what happens --------------------------------------------------------------------------------------


async def _nothing(_deployment: Deployment, _notes: Notes) -> None:
    pass


def killed(*names: str, away_s: float = 0.0, meanwhile: Doing = _nothing) -> Happening:
    """Kill all of them at once; restart them after a time, or when an action has finished."""

    def of(deployment: Deployment, notes: Notes) -> Disturbance:
        async def disturb() -> bool:
            gone = [_victim(deployment, name) for name in names]
            notes.at_s = time.time()
            for one in gone:
                one.may_run.clear()
                one.signal(signal.SIGKILL)
            try:
                until_s = time.monotonic() + away_s
                await meanwhile(deployment, notes)
                await asyncio.sleep(until_s - time.monotonic())
            finally:
                for one in gone:
                    one.may_run.set()
            return True

        return after_events(deployment, UNDER_WAY, disturb)

    return of


def stopped(*names: str, meanwhile: Doing = _nothing) -> Happening:
    """Stop all of them at once, and resume them later."""

    def of(deployment: Deployment, notes: Notes) -> Disturbance:
        async def disturb() -> bool:
            gone = [_victim(deployment, name) for name in names]
            notes.at_s = time.time()
            for one in gone:
                one.signal(signal.SIGSTOP)
            try:
                until_s = time.monotonic() + AWAY_S
                await meanwhile(deployment, notes)
                await asyncio.sleep(until_s - time.monotonic())
            finally:
                for one in gone:
                    one.signal(signal.SIGCONT)
            return True

        return after_events(deployment, UNDER_WAY, disturb)

    return of


def slowed(delay_s: float) -> Happening:
    """Slow down every connection to NATS for a while."""

    def of(deployment: Deployment, notes: Notes) -> Disturbance:
        async def disturb() -> bool:
            notes.at_s = time.time()
            for role in deployment.roles.values():
                role.proxy.slow(delay_s)
            try:
                await asyncio.sleep(AWAY_S)
            finally:
                for role in deployment.roles.values():
                    role.proxy.heal()
            return True

        return after_events(deployment, UNDER_WAY, disturb)

    return of


def _victim(deployment: Deployment, name: str) -> Victim:
    if name == "nats":
        return deployment.nats
    if name == "leader":
        leader = deployment.leader
        assert leader is not None, "a deployment that is ready has a leader"
        return leader
    return deployment.roles[name]


async def new_requests_are_told_to_come_again(deployment: Deployment, notes: Notes) -> None:
    """While the log is away, new requests get a 503 with a retry time, quickly."""
    await asyncio.sleep(2.5)  # by then everybody has noticed
    for url in deployment.doors.urls:
        async with httpx.AsyncClient(timeout=_ANSWER_S) as http:
            began_s = time.monotonic()
            try:
                answer = await http.post(f"{url}/generate", json={**GREEDY.fields, "streaming": False})
            except httpx.HTTPError as error:
                notes.find("not-refused", f"a new request was not answered: {error!r}")
                continue
            took_s = time.monotonic() - began_s
        told = f"{answer.status_code}, Retry-After {answer.headers.get('retry-after')}"
        notes.said.append(f"a new request was told {told} within {took_s:.2f} s")
        if answer.status_code != 503 or "retry-after" not in answer.headers:
            notes.find("not-refused", f"a new request was told {told}: {answer.text[:200]}")


async def without_snapshots(deployment: Deployment, notes: Notes) -> None:
    """Delete the snapshots: a restarted conductor has only the log."""
    found = _snapshots(deployment)
    notes.said.append(f"{len(found)} snapshot files were deleted")
    if not found:
        notes.find("no-snapshot", "there was none to delete")
    for one in found:
        one.unlink()


async def with_damaged_snapshots(deployment: Deployment, notes: Notes) -> None:
    """Change one byte in the middle of each snapshot."""
    found = _snapshots(deployment)
    notes.said.append(f"a byte in {len(found)} snapshot files was changed")
    if not found:
        notes.find("no-snapshot", "there was none to damage")
    for one in found:
        data = bytearray(one.read_bytes())
        data[len(data) // 2] ^= 1
        one.write_bytes(data)


def _snapshots(deployment: Deployment) -> list[Path]:
    return [one for one in (deployment.folder / "data").rglob("snapshot*") if one.is_file()]


# ---- what is looked at besides -------------------------------------------------------------------------


def nobody_was_declared_lost(outcome: Outcome, notes: Notes) -> None:
    """An outage of the log must not declare a worker lost."""
    lost = [record.seq for record in outcome.records if record.subject.endswith(".conductor.lost")]
    if lost:
        notes.find("declared-lost", f"workers were declared lost at {lost}")
    else:
        notes.said.append("no worker was declared lost")


def somebody_was_declared_lost(outcome: Outcome, notes: Notes) -> None:
    """Note how long it took to declare the worker lost."""
    lost = [record for record in outcome.records if record.subject.endswith(".conductor.lost")]
    if lost:
        notes.said.append(f"lost workers were declared after {lost[0].time_s - notes.at_s:.2f} s")
    else:
        notes.find("not-declared-lost", "no worker was declared lost")


def another_took_over(outcome: Outcome, notes: Notes) -> None:
    """Note the time to the next epoch, and to the first decision after it, by the log's clock."""
    epochs = [one for one in outcome.records if one.subject.endswith(".conductor.epoch")]
    if not epochs:
        notes.find("no-take-over", "nobody opened an epoch")
        return
    decided = [one for one in outcome.records if one.seq > epochs[0].seq and _is_decision(one)]
    notes.said.append(f"the next epoch was opened after {epochs[0].time_s - notes.at_s:.2f} s")
    if decided:
        notes.said.append(f"the first decision followed {decided[0].time_s - epochs[0].time_s:.3f} s later")


def _is_decision(record: Record) -> bool:
    if record.subject.split(".")[1] not in {"walk", "ready", "output"}:
        return False
    return bool(msgspec.msgpack.decode(record.data).get("writer") == "conductor")


_CONDUCTORS: Final = ("conductor-0", "conductor-1")
_WORKERS: Final = ("worker-0", "worker-1")
_ALL: Final = ("nats", "gateway-0", "gateway-1", *_CONDUCTORS, *_WORKERS)
SCENARIOS: Final = (
    Scenario(name="nats-killed", happens=killed("nats"), times=KILLS, judges=(nobody_was_declared_lost,)),
    Scenario(
        name="nats-away",
        happens=killed("nats", away_s=AWAY_S, meanwhile=new_requests_are_told_to_come_again),
        judges=(nobody_was_declared_lost,),
    ),
    Scenario(
        name="nats-silent",
        happens=stopped("nats", meanwhile=new_requests_are_told_to_come_again),
        judges=(nobody_was_declared_lost,),
    ),
    Scenario(name="nats-slow", happens=slowed(0.2), judges=(nobody_was_declared_lost,)),
    Scenario(name="stand-by", happens=killed("leader", away_s=AWAY_S), judges=(another_took_over,)),
    Scenario(name="conductors-killed", happens=killed(*_CONDUCTORS), judges=(another_took_over,)),
    Scenario(name="conductors-stopped", happens=stopped(*_CONDUCTORS), judges=(nobody_was_declared_lost,)),
    Scenario(name="snapshots-deleted", happens=killed(*_CONDUCTORS, meanwhile=without_snapshots)),
    Scenario(name="snapshots-damaged", happens=killed(*_CONDUCTORS, meanwhile=with_damaged_snapshots)),
    Scenario(name="gateway-away", happens=killed("gateway-0", away_s=AWAY_S)),
    Scenario(name="gateways-killed", happens=killed("gateway-0", "gateway-1")),
    Scenario(
        name="worker-away", happens=killed("worker-0", away_s=AWAY_S), judges=(somebody_was_declared_lost,)
    ),
    Scenario(name="workers-killed", happens=killed(*_WORKERS)),
    Scenario(name="worker-and-conductor-killed", happens=killed("worker-0", "leader")),
    Scenario(name="everybody-killed", happens=killed(*_ALL)),
    Scenario(name="everybody-stopped", happens=stopped(*_ALL)),
)


# ---- on deployments of their own -----------------------------------------------------------------------

POISON_CODE: Final = "poison_request"


async def poisoned(folder: Path) -> Outcome:
    """Two requests kill their workers, one at once and one after some tokens, among innocent requests."""
    shape = Shape(
        checkpoint=tiny_checkpoint("qwen3"), family="poisonous", env=poison.environment(folder / "family")
    )
    async with deployed(folder, shape) as deployment:
        rounds = Rounds(deployment)
        undisturbed = await rounds.undisturbed()
        outcome = await rounds.round(
            "poison",
            [*undisturbed.questions, _poison("at-once", 0), _poison("soon", 5)],
            expected=undisturbed.expected,
        )
        outcome.note = f"{outcome.attempts} attempts were begun again among {outcome.clients} clients"
        return outcome


def _poison(name: str, after: int) -> Question:
    return replace(
        GREEDY,
        name=f"poison-{name}",
        fields={**GREEDY.fields, "text": poison.kills(after=after)},
        fails_with=POISON_CODE,
    )


async def hung(folder: Path) -> Outcome:
    """A worker's heartbeats continue without progress: it is declared lost, and joins again on resuming."""
    shape = Shape(checkpoint=tiny_checkpoint("qwen3"), settings={"recovery": {"worker_hung_s": _HUNG_S}})
    async with deployed(folder, shape) as deployment:
        rounds, notes = Rounds(deployment), Notes()
        undisturbed = await rounds.undisturbed()
        worker = deployment.roles["worker-0"]

        async def disturb() -> bool:
            worker.order("worker.token.computed", 60, "wait")
            while not worker.has_reached:  # noqa: ASYNC110 - a file's
                await asyncio.sleep(0.01)
            notes.at_s = time.time()
            await asyncio.sleep(3 * _HUNG_S)
            worker.disarm()
            return True

        outcome = await rounds.round(
            "worker-hung", undisturbed.questions, expected=undisturbed.expected, disturb=disturb
        )
        await deployment.wait_until_ready()
        return judged(outcome, notes, (somebody_was_declared_lost,))


async def stormy(folder: Path) -> Outcome:
    """Random faults of random processes; each round has a seed that determines all of them."""
    shape = Shape(checkpoint=tiny_checkpoint("qwen3"), settings={"max_attempts": _MANY})
    async with deployed(folder, shape) as deployment:
        rounds, outcomes = Rounds(deployment), []
        undisturbed = await rounds.undisturbed()
        for seed in range(_STORMS):
            await deployment.wait_until_ready()
            notes = Notes()
            outcome = await rounds.round(
                f"storm-{seed}",
                [*undisturbed.questions, LEAVER],
                expected=undisturbed.expected,
                disturb=_storm(deployment, seed, notes),
            )
            outcome.findings = [
                replace(one, message=f"{one.message} [storm {seed}: {'; '.join(notes.said)}]")
                for one in outcome.findings
            ]
            outcomes.append(outcome)
        return replace(together(outcomes), name="storm")


def _storm(deployment: Deployment, seed: int, notes: Notes) -> Disturbance:
    chance = random.Random(seed)
    names = [*deployment.roles, "nats"]

    async def disturb() -> bool:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(chance.randint(2, _GUSTS)):
                await asyncio.sleep(chance.uniform(0.05, 1.2))
                name, action = chance.choice(names), chance.choice(ACTIONS)
                notes.said.append(f"{action} {name}")
                if name != "nats":
                    tasks.create_task(at_once(deployment.roles[name], action)())
                else:  # who restarts is away for long enough
                    deployment.nats.signal(signal.SIGKILL)
        return True

    return disturb


class Three:
    """A cluster of three servers for the log; the one that leads the stream is killed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = Cluster(folder, advertises=False, syncs=False)
        self.may_run = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cluster")

    @property
    def url(self) -> str:
        return self.cluster.url

    @property
    def token(self) -> str:
        token = self.cluster.credentials.token
        assert token is not None
        return token

    async def start(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.cluster.start)
        keeping = StreamPolicy(durability="cluster")
        await jetstream.provision(self.url, self.cluster.credentials, Subjects(), keeping, timeout_s=30)

    def signal(self, number: signal.Signals) -> None:
        raise AssertionError("a member is killed, not all of them")

    async def run(self) -> None:
        """Do nothing: the test that kills its members also restarts them."""

    async def close(self) -> None:
        self.cluster.kill()
        self._thread.shutdown()


async def clustered(folder: Path) -> Outcome:
    """The leader of the stream is killed: its successor takes seconds, and no worker is declared lost."""
    return await _in_a_cluster(folder, "cluster-leader-killed", _kill_the_leader)


async def clustered_and_hung(folder: Path) -> Outcome:
    """The same with a leader that hangs: its connections stay open without any response."""
    return await _in_a_cluster(folder, "cluster-leader-hung", _hang_the_leader)


async def _kill_the_leader(leader: Member) -> None:
    leader.kill()
    await asyncio.sleep(2 * AWAY_S)
    leader.start()


async def _hang_the_leader(leader: Member) -> None:
    leader.hang()
    try:
        await asyncio.sleep(2 * AWAY_S)
    finally:
        leader.wake()


async def _in_a_cluster(folder: Path, name: str, hurt: Callable[[Member], Awaitable[None]]) -> Outcome:
    shape = Shape(checkpoint=tiny_checkpoint("qwen3"), settings={"nats": {"durability": "cluster"}})
    async with deployed(folder, shape, Three) as deployment:
        assert isinstance(deployment.nats, Three)
        cluster = deployment.nats.cluster
        rounds, notes = Rounds(deployment), Notes()
        undisturbed = await rounds.undisturbed()
        await cluster.in_step(STREAM)

        async def disturb() -> bool:
            leader = await cluster.leader(STREAM)
            notes.said.append(f"{leader.name} led")
            await hurt(leader)
            return True

        outcome = await rounds.round(
            name,
            list(undisturbed.questions) * LOAD,
            expected=undisturbed.expected,
            disturb=after_events(deployment, UNDER_WAY, disturb),
        )
        return judged(outcome, notes, (nobody_was_declared_lost,))


async def store_lost(folder: Path) -> Outcome:
    """The server restarts without its store: the loss is reported, and the deployment recovers."""
    async with deployed(folder, Shape(checkpoint=tiny_checkpoint("qwen3"))) as deployment:
        rounds, notes = Rounds(deployment), Notes()
        undisturbed = await rounds.undisturbed()
        asked = await _while_the_store_is_lost(deployment, rounds, undisturbed, notes)
        await deployment.wait_until_ready()
        after = Rounds(deployment)
        outcome = await after.round("store-lost", undisturbed.questions, expected=undisturbed.expected)
        told = sorted({one.gave_up.partition(":")[0] or "an answer" for one in asked})
        notes.said.append(f"clients of then were told: {', '.join(told)}")
        return judged(outcome, notes, ())


async def _while_the_store_is_lost(
    deployment: Deployment, rounds: Rounds, undisturbed: Undisturbed, notes: Notes
) -> list[Seen]:
    """Send requests and remove the log meanwhile; return what the clients received."""

    async def lose() -> bool:
        assert isinstance(deployment.nats, Nats)
        deployment.nats.may_run.clear()
        deployment.nats.signal(signal.SIGKILL)
        await asyncio.to_thread(shutil.rmtree, deployment.folder / "nats" / "jetstream")
        deployment.ledger.acked.clear()
        deployment.nats.may_run.set()
        credentials = deployment.nats.server.credentials
        await jetstream.provision(deployment.nats.url, credentials, Subjects(), timeout_s=30)
        return True

    asked = await rounds.ask("store-losing", undisturbed.questions, after_events(deployment, UNDER_WAY, lose))
    for seen in asked:
        if seen.gave_up.startswith("no end within"):
            notes.find("hanging", f"{seen.request_id}: {seen.gave_up}; refusals: {seen.refusals[-2:]}")
        expected = undisturbed.expected[seen.question.name]
        for choice, whole in enumerate(expected.texts):
            if not whole.startswith(seen.text_of(choice)):
                notes.find("contradicted", f"{seen.request_id} was told {seen.text_of(choice)!r:.200}")
    return asked


_ON_THREE_RANKS: Final = [
    {"node_names": ["LLM"], "ranks": [0], "graph_walks": ["prefill"]},
    {"node_names": ["LLM"], "ranks": [1], "graph_walks": ["decode"]},
    {"node_names": ["snac_decoder"], "ranks": [2], "graph_walks": ["snac_chunk"]},
]


async def spoken(folder: Path) -> Outcome:
    """A model on three ranks emits audio; each rank is killed, stopped and cut off in the middle.

    What cannot be continued is computed again, and must equal what was already received.
    """
    shape = Shape(
        checkpoint=tiny_orpheus(),
        family="orpheus",
        workers=3,
        settings={"node_groups": _ON_THREE_RANKS, "max_seq_len": 2048},
    )
    async with deployed(folder, shape) as deployment:
        rounds, outcomes = Rounds(deployment), []
        undisturbed = await rounds.undisturbed(SPOKEN)
        for role in deployment.of("worker"):
            for action in ACTIONS:
                await deployment.wait_until_ready()
                hurt = after_events(deployment, _SPEAKING, at_once(role, action))
                name = f"speech-{role.name}-{action}"
                expected = undisturbed.expected
                outcomes.append(await rounds.round(name, SPOKEN, expected=expected, disturb=hurt))
        return replace(together(outcomes), name="speech")


OTHERS: Final[Mapping[str, Callable[[Path], Awaitable[Outcome]]]] = {
    "worker-hung": hung,
    "storm": stormy,
    "poison": poisoned,
    "speech": spoken,
    "store-lost": store_lost,
    "cluster-leader-killed": clustered,
    "cluster-leader-hung": clustered_and_hung,
}
"""By name, those on a deployment of their own, in a folder."""
