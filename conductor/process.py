"""The conductor's process: it reads the log, lets the core decide, and puts decisions into the log.

Thin. It claims an epoch at once and reads the log from its beginning; it leads from the moment it reads
that claim back, because then it has folded everything before it: it publishes what is decided but not
recorded, and goes on. A conductor that reads a higher epoch follows, and claims the next one only when
the leader's beats have stopped while its own connection was up: silence of its own is no one's death.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.request import Decision
from conductor.core.schedule import Deployment
from conductor.deployment import deployment_of
from shared import tracing
from shared.config import DeploymentConfig
from shared.errors import CapacityError
from shared.events import (
    EpochOpened,
    Event,
    MalformedEventError,
    NodeReady,
    OutputFence,
    WalkStop,
    decode,
    encode,
)
from shared.log import jetstream
from shared.log.port import Log, LogState, StoredRecord, WrongLastSequenceError
from shared.meters import ConductorMeters
from shared.models import registry
from shared.said import quoting
from shared.subjects import CONDUCTOR_WRITER, Subjects

_LOGGER = logging.getLogger("conductor")
BEAT_S: Final = 0.5
LEADER_SILENT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorOptions:
    """Where the log is, and what is served."""

    config: DeploymentConfig
    nats_url: str
    nats_token: str | None = None
    prefix: str = "ds"


async def run(options: ConductorOptions) -> None:
    """Follow and lead until cancelled."""
    subjects = Subjects(options.prefix)
    name = f"c-{secrets.token_hex(4)}"
    cluster = Cluster(registry.graph, subjects)
    log = await jetstream.connect(
        options.nats_url,
        token=options.nats_token,
        subjects=subjects,
        name=f"conductor {name}",
        timeout_s=jetstream.ROLE_PATIENCE_S,
    )
    try:
        deployment = deployment_of(options.config, max_event_bytes=log.max_payload)
        await Conductor(log, cluster, deployment, subjects, name).run()
    finally:
        await log.close()


class Conductor:
    """One conductor's life: `cluster` is the mind, `log` the only thing it touches."""

    def __init__(
        self, log: Log, cluster: Cluster, deployment: Deployment, subjects: Subjects, name: str
    ) -> None:
        self._log = log
        self._cluster = cluster
        self._deployment = deployment
        self._subjects = subjects
        self._name = name
        self._published = 0
        self._folded = 0
        self._led = False
        self._leads_now = asyncio.Event()
        self._claimed_seq = 0
        self._leader_heard_s = time.monotonic()

    @property
    def leading(self) -> bool:
        """Whether the epoch read last is this conductor's."""
        return self._cluster.leader == self._name

    async def run(self) -> None:
        """Fold the log, and decide while leading, until cancelled."""
        await self._claim()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="follow")
            tasks.create_task(self._watch_leader(), name="watch leader")
            tasks.create_task(self._beat(), name="beat")

    # ---- the log -----------------------------------------------------------------------------------
    async def _follow(self) -> None:
        before, started_s = await self._log.state(), time.monotonic()
        start_seq = max(1, before.first_seq)
        async with aclosing(self._log.read(self._subjects.for_conductor(), start_seq)) as records:
            async for record in records:
                led = self._led
                await self._take(record, is_news=record.seq > before.last_seq)
                if self._led and not led:
                    self._leads_now.set()
                    _LOGGER.info(
                        "leading in epoch %d: read the log's %d events in %.2f s, %d requests are open",
                        self._cluster.fence.epoch,
                        record.seq - start_seq + 1,
                        time.monotonic() - started_s,
                        len(self._cluster.open),
                    )
                elif led and not self._led:
                    _LOGGER.warning("deposed by %s: following", self._cluster.leader)

    async def _take(self, record: StoredRecord, *, is_news: bool) -> None:
        """Fold one record; while leading, publish what follows from it."""
        read_ns = time.time_ns()
        folded = self._cluster.fold(record)
        self._folded += 1
        if folded.note and is_news:
            _LOGGER.info(folded.note, extra=quoting(folded.quotation) if folded.quotation else None)
        if folded.divergence:
            _LOGGER.error("record %d: %s", record.seq, folded.divergence.message)
        led, self._led = self._led, self.leading
        if self._led:
            decisions = folded.decisions if led else self._cluster.outstanding()
            await self._publish((*decisions, *self._cluster.schedule(self._deployment)), record.seq, read_ns)

    async def _publish(self, decisions: Iterable[Decision], seq: int, read_ns: int) -> None:
        """Put decisions into the log, that follow from the record at `seq`, read at `read_ns`."""
        for decision in decisions:
            span = _span(decision, seq, read_ns) if tracing.is_on() else tracing.NOTHING
            stored = None if span is tracing.NOTHING else partial(_stored, span)
            await self._post(self._subject(decision), self._stamped(decision), stored)

    async def _post(self, subject: str, event: Event, stored: Callable[[int], None] | None) -> None:
        while True:
            try:
                return self._log.post(subject, encode(event), stored)
            except CapacityError:
                await self._log.drain()

    def _stamped(self, decision: Decision) -> Event:
        self._published += 1
        return msgspec.structs.replace(
            decision, writer=CONDUCTOR_WRITER, number=self._published, epoch=self._cluster.fence.epoch
        )

    def _subject(self, decision: Decision) -> str:
        request_id = str(decision.request_id)
        match decision:
            case NodeReady() | WalkStop():
                return self._subjects.ready(decision.rank, request_id)
            case OutputFence():
                return self._subjects.output(self._origin(request_id), request_id, CONDUCTOR_WRITER)
            case _:
                return self._subjects.walk(request_id)

    def _origin(self, request_id: str) -> str:
        request = self._cluster.request(request_id)
        assert request is not None, "a fence is decided for a request that is known"
        return request.submission.origin

    # ---- who leads ---------------------------------------------------------------------------------
    async def _claim(self) -> None:
        """Open the next epoch, unless another conductor does so first."""
        last = await self._log.last(self._subjects.epoch)
        epoch = _epoch_after(last, await self._log.state())
        claim = EpochOpened(
            id=f"epoch.{epoch}.{self._name}",
            writer=CONDUCTOR_WRITER,
            number=0,
            epoch=epoch,
            conductor=self._name,
            core=self._deployment.core_digest,
        )
        self._leader_heard_s = time.monotonic()
        try:
            self._claimed_seq = await self._log.publish(
                self._subjects.epoch, encode(claim), expected_last_seq=last.seq if last else 0
            )
        except WrongLastSequenceError:
            _LOGGER.info("another conductor opened an epoch first: following")

    async def _watch_leader(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear_beats(), name="hear beats")
            while True:
                await asyncio.sleep(BEAT_S)
                claim_is_read = self._cluster.seq >= self._claimed_seq
                if self.leading or not self._log.connected or not claim_is_read:
                    self._leader_heard_s = time.monotonic()
                elif time.monotonic() - self._leader_heard_s > LEADER_SILENT_S:
                    _LOGGER.warning(
                        "no beat of a leader for %.1f s: claiming the next epoch", LEADER_SILENT_S
                    )
                    await self._claim()

    async def _hear_beats(self) -> None:
        own = self._subjects.beat("conductor", self._name)
        async with aclosing(self._log.listen(self._subjects.beat("conductor", "*"))) as beats:
            async for subject, data in beats:
                if subject != own and _leads(data):
                    self._leader_heard_s = time.monotonic()

    async def _beat(self) -> None:
        while True:
            beat = {
                "state": "leading" if self.leading else "following",
                "epoch": self._cluster.fence.epoch,
                "seq": self._cluster.seq,
                "open": len(self._cluster.open),
                "waiting": len(self._cluster.waiting),
                "pid": os.getpid(),
                "meters": ConductorMeters(
                    log=self._log.stats(), folded=self._folded, decisions=self._published
                ),
            }
            await self._log.beat(self._subjects.beat("conductor", self._name), msgspec.msgpack.encode(beat))
            with contextlib.suppress(TimeoutError):  # who waits for a leader hears at once
                async with asyncio.timeout(BEAT_S):
                    await self._leads_now.wait()
            self._leads_now.clear()


def _span(decision: Decision, seq: int, read_ns: int) -> tracing.Span:
    """A decision, from the reading of the record it follows from to its ack."""
    tag = str(decision.__struct_config__.tag).removesuffix(".v1")
    return tracing.start(
        f"decide {tag}",
        decision.trace,
        {
            "dalsegno.request_id": str(decision.request_id),
            "dalsegno.attempt": decision.attempt,
            "dalsegno.step": decision.index,
            "dalsegno.read_seq": seq,
        },
        since_ns=read_ns,
    )


def _stored(span: tracing.Span, seq: int) -> None:
    span.set({"dalsegno.log_seq": seq})
    span.end()


def _leads(beat: bytes) -> bool:
    """Whether a beat is a leader's; what is no beat is nobody's."""
    try:
        signs = msgspec.msgpack.decode(beat, type=dict[str, Any])
    except msgspec.MsgspecError:
        return False
    return signs.get("state") == "leading"


def _epoch_after(last: StoredRecord | None, log: LogState) -> int:
    """The epoch that follows the one opened last.

    Every epoch is at most the sequence it is stored at. So if the log has forgotten the last one, or what
    stands there cannot be read, the next sequence is higher than any epoch there was.
    """
    if last is None:
        return 1 if log.first_seq <= 1 else 1 + log.last_seq
    try:
        return 1 + (decode(last.data).epoch or 0)
    except MalformedEventError:
        return 1 + last.seq
