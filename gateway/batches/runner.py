"""The batches that this gateway runs: those that were asked for here, and those whose gateway is silent.

The gateway that creates a batch runs it, and says so once a second (`gateway.batches.live`). When nothing was
heard of a batch for some seconds, another gateway claims it on the log; of several, one succeeds. A gateway
that was only slow finds the claim when it stores its next event, and stops.

Their events go over the second connection (`gateway.requests.second_log`).
"""

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import Final

import msgspec
from starlette.types import ASGIApp

from gateway.batches.live import LiveBatches
from gateway.batches.run import BatchRun
from gateway.batches.slots import LineSlots
from gateway.batches.state import BatchState, fold_records
from gateway.requests.refusal_writer import OpenLog
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from shared.errors import DalSegnoError
from shared.events import BatchClaimed, encode
from shared.log.port import Log, LogUnavailableError, WrongLastSequenceError

_LOGGER: Final = logging.getLogger(__name__)
_BEAT_S: Final = 1.0
_RECONNECT_S: Final = 1.0


class BatchRunner:
    """Runs batches for one gateway.

    Args:
        gateway: its state.
        app: answers lines.
        live: gets what is heard of batches.
        second: gets the connection for their events.
    """

    def __init__(self, gateway: Gateway, app: ASGIApp, live: LiveBatches, second: SecondLog) -> None:
        self._gateway = gateway
        self._live = live
        self._second = second
        self._app = app
        self._slots = LineSlots(gateway.settings.batch_lines)
        self._states: dict[str, BatchState] = {}
        self._begun: set[str] = set()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}

    async def run(self, open_log: OpenLog) -> None:
        """Run batches until cancelled. Their requests then go on, for the gateway that takes them over."""
        warned = ""
        while True:
            try:
                async with open_log() as log:
                    warned = ""
                    await self._follow(log)
            except* DalSegnoError as group:
                reason = str(group.exceptions[0])
                if reason != warned:  # once per reason
                    warned = reason
                    _LOGGER.warning("no batches run at this gateway now: %s", reason)
            await asyncio.sleep(_RECONNECT_S)

    async def _follow(self, log: Log) -> None:
        """Follow the events of all batches, and run those of this gateway."""
        self._states.clear()
        self._runs.clear()
        self._live.begin_anew()
        subjects = [self._gateway.subjects.batch("*")]
        last_seq = (await log.state()).last_seq
        async with aclosing(log.history(subjects, 1, last_seq)) as records:
            async for record in records:
                fold_records(self._states, record, self._gateway.subjects)
        self._second.connected(log)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(log), name="batches heard")
                tasks.create_task(self._beat(log), name="batches beat")
                for batch_id in list(self._states):
                    self._settle(batch_id, log, tasks)
                async with aclosing(log.read(subjects, last_seq + 1)) as records:
                    async for record in records:
                        found = fold_records(self._states, record, self._gateway.subjects)
                        if found is not None:
                            self._settle(found, log, tasks)
        finally:
            self._second.connected(None)

    def _settle(self, batch_id: str, log: Log, tasks: asyncio.TaskGroup) -> None:
        """Run a batch, or end its run here, as its state says now."""
        state = self._states[batch_id]
        if batch_id in self._runs:
            run, task = self._runs[batch_id]
            run.folded()
            if state.ended is None and state.owner != self._gateway.origin:
                _LOGGER.warning("batch %s is run by another gateway now", batch_id)
                task.cancel()
                del self._runs[batch_id]
        elif state.created is not None and state.ended is None and state.owner == self._gateway.origin:
            is_new = batch_id not in self._begun and state.created.writer == self._gateway.origin
            self._begun.add(batch_id)
            run = BatchRun(self._gateway, self._app, log, state, self._slots, is_new=is_new)
            self._runs[batch_id] = run, tasks.create_task(run.run(), name=f"batch {batch_id}")
        if state.ended is not None:  # its run, if any, finds the end itself
            del self._states[batch_id]
            self._runs.pop(batch_id, None)
            self._live.forget(batch_id)
            self._begun.discard(batch_id)

    async def _listen(self, log: Log) -> None:
        now_s = asyncio.get_running_loop().time
        async with aclosing(log.listen(self._gateway.subjects.heartbeat("batch", "*"))) as heartbeats:
            async for subject, payload in heartbeats:
                batch_id = subject.rpartition(".")[2]
                if batch_id in self._states:
                    self._live.receive(batch_id, payload, now_s())

    async def _beat(self, log: Log) -> None:
        """Send heartbeats of the batches that run here, and claim those that nobody runs."""
        subjects, origin = self._gateway.subjects, self._gateway.origin
        while True:
            for batch_id, (run, _) in list(self._runs.items()):
                payload = msgspec.msgpack.encode(run.beat())
                await log.send_heartbeat(subjects.heartbeat("batch", batch_id), payload)
            now_s = asyncio.get_running_loop().time()
            if not log.connected:
                self._live.begin_anew()
            for state in list(self._states.values()):
                is_others = state.created is not None and state.owner != origin
                if is_others and self._live.is_silent(state.id, state.owner, now_s):
                    await self._claim(log, state)
            await asyncio.sleep(_BEAT_S)

    async def _claim(self, log: Log, state: BatchState) -> None:
        """Claim a batch, unless another gateway has written to it meanwhile."""
        event = BatchClaimed(
            id=f"{self._gateway.origin}.{state.id}.claim.{state.last_seq}", writer=self._gateway.origin
        )
        with suppress(WrongLastSequenceError, LogUnavailableError):
            await log.publish(
                self._gateway.subjects.batch(state.id), encode(event), expected_last_seq=state.last_seq
            )
