"""The key of worker 1 against a request on rank 0, on a real server, before and after worker 0 died.

What the server denies is not stored; what it stores is void for every reader: the gateway, the documented
example, the recovery of a successor.
"""

import runpy
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pytest
from nats.js.api import ConsumerConfig

from gateway.requests.relay import Answered, Relay
from shared.events import Event, OutputChunk, OutputFence, RequestFinished, RequestResumed, Usage, encode
from shared.log.nats import jetstream
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log
from shared.transcript import Transcript
from tests.admissions import admitted
from tests.e2e.clients import ROOT
from tests.shared.log.roles import ROLES, SUBJECTS, guarded, plain
from workers.execution.recovered_output import OutputRecovery
from workers.orders.inbox import StepKey

pytestmark = pytest.mark.processes
FIRST: Final = {"w0": 10}
NEXT: Final = {"w0": 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with guarded(tmp_path_factory.mktemp("nats")) as server:
        yield server


@dataclass
class Request:
    """One request, told by hand: each event by the key of its role."""

    id: str
    logs: dict[str, Log]
    transcript: Transcript = field(default_factory=Transcript)

    async def decide(self, event: Event, subject: str | None = None) -> int:
        event = msgspec.structs.replace(event, writer="conductor", epoch=1)
        return await self.logs["conductor"].publish(subject or SUBJECTS.walk(self.id), encode(event))

    async def fence(self, attempt: int, **fields: Any) -> int:
        event = OutputFence(
            id=f"fence.{attempt}", request_id=self.id, attempt=attempt, reason="", history=b"", **fields
        )
        return await self.decide(event, SUBJECTS.output("nats", self.id, "conductor"))

    async def resume(self, lives: dict[str, int]) -> int:
        return await self.decide(
            RequestResumed(
                id="resumed.0", request_id=self.id, attempt=2, placement={"llm": 0}, lives=lives, reason=""
            )
        )

    async def speak(self, text: str, life: int, attempt: int = 1) -> None:
        """Worker 0 puts out the next chunk."""
        chunk = self.chunk(text, self.transcript.next_index, life, attempt)
        self.transcript.fold(chunk)
        await self.logs["worker-0"].publish(SUBJECTS.output("nats", self.id, "w0"), encode(chunk))

    async def forge(self, life: int) -> None:
        """Worker 1 puts out chunks at every index and attempt near, signed as itself and as worker 0."""
        for writer in ("w1", "w0"):
            for index in range(4):
                for attempt in (1, 2, 9):
                    chunk = self.chunk("FORGED", index, life, attempt, writer)
                    await self.logs["worker-1"].publish(SUBJECTS.output("nats", self.id, "w1"), encode(chunk))

    def chunk(self, text: str, index: int, life: int, attempt: int = 1, writer: str = "w0") -> OutputChunk:
        return OutputChunk(
            id=f"{writer}.{text}.{attempt}.{index}", writer=writer, request_id=self.id, attempt=attempt,
            incarnation=life, index=index, text=text, token_ids=[index],
        )  # fmt: skip

    async def finish(self) -> int:
        return await self.decide(
            RequestFinished(
                id="end", request_id=self.id, usage=Usage(), finish_reasons=["stop"],
                output=self.transcript.totals, history=b"",
            )
        )  # fmt: skip


@asynccontextmanager
async def request(server: NatsServer, request_id: str) -> AsyncIterator[Request]:
    await jetstream.provision(server.url, ROLES["provisioner"], SUBJECTS)
    async with AsyncExitStack() as stack:
        logs: dict[str, Log] = {}
        for role in ("conductor", "gateway", "worker-0", "worker-1"):
            logs[role] = log = await jetstream.connect(
                server.url, credentials=ROLES[role], subjects=SUBJECTS, name=role
            )
            stack.push_async_callback(log.close)
        yield Request(request_id, logs)


@pytest.mark.parametrize("dies", [False, True])
async def test_a_workers_key_changes_no_output_of_a_request_on_another_rank(
    server: NatsServer, dies: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with plain(server, "worker-1") as client:
        await client.publish("ds.output.nats.r.w0", b"whatever it is")
        assert await client.settle() == ['publish to "ds.output.nats.r.w0"']
    async with request(server, f"forged-{dies}") as told:
        await told.forge(10)  # before it is admitted
        start = await told.decide(admitted(told.id, FIRST))
        await told.forge(10)
        await told.speak("Return ", 10)
        await told.forge(10)
        if dies:
            await told.fence(2)
            await told.forge(10)
            await told.forge(20)
            end = await told.resume(NEXT)
            await told.forge(20)
            assert await recovered(told, end) == "Return "
            await told.speak("the end", 20, attempt=2)
        else:
            await told.speak("the end", 10)
        await told.forge(20 if dies else 10)
        await told.finish()
        await told.forge(20)

        relay = Relay(told.logs["gateway"], SUBJECTS, told.id)
        relay.output.submission_seq = 0
        relay.reread(1, epoch=0)
        async with aclosing(relay.items()) as items:
            answer = [item async for item in items]
        assert "".join(item.text for item in answer if isinstance(item, OutputChunk)) == "Return the end"
        assert isinstance(answer[-1], Answered)
        warnings = [one.getMessage() for one in caplog.records if "is void" in one.getMessage()]
        assert any("w1: a writer without an order" in one for one in warnings)
        assert len(warnings) == len(set(warnings)) <= 4, "once for each reason"

        await example(server, told.id, start)
        assert capsys.readouterr().out == "Return the end\n"


async def recovered(told: Request, order_seq: int) -> str:
    """The released text that a successor of worker 0 continues after."""
    recovery = OutputRecovery(SUBJECTS, StepKey(told.id, 2, 0), order_seq)
    async with aclosing(told.logs["worker-0"].history(recovery.subjects())) as records:
        async for record in records:
            recovery.fold(record)
    return recovery.result()[""].prefix_text


async def example(server: NatsServer, request_id: str, seq: int) -> None:
    """Read the answer as the example of docs/nats.md does."""
    read_answer = runpy.run_path(str(ROOT / "docs" / "examples" / "ask_over_nats.py"))["read_answer"]
    async with plain(server, "client") as client:
        wanted = ["ds.conductor.epoch", f"ds.walk.{request_id}", f"ds.output.nats.{request_id}.*"]
        config = ConsumerConfig(filter_subjects=wanted, idle_heartbeat=0.5)
        events = await client.jetstream().subscribe(
            "", stream=SUBJECTS.stream, ordered_consumer=True, config=config
        )
        await read_answer(events, seq)
