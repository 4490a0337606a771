"""A deployment in one process: a log in memory, a gateway, and a scripted conductor and worker."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from configs.deployment import GatewaySettings, MediaSettings
from configs.secrets import ApiKey
from gateway.app import create_app
from gateway.batches.live import LiveBatches
from gateway.http import server
from gateway.middleware.refusals import unread
from gateway.middleware.stack import GatewayApp
from gateway.policy.routes import serves_actions
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from gateway.served_model import ServedModel
from shared.events import (
    Event,
    Failure,
    MalformedEventError,
    OutputChunk,
    OutputTotals,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    TokenLogprobs,
    Usage,
    WorkerJoined,
    decode,
    encode,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import LogRegressedError
from shared.media.memory import MemoryMediaStore
from shared.media.store import MediaStore
from shared.subjects import CONDUCTOR_WRITER, Subjects
from shared.transcript import Transcript
from tests.admissions import admitted
from tests.gateway.openai_schema import check

SERVED = ServedModel(
    name="demo",
    family="decoder_lm",
    ranks=(0,),
    max_seq_len=512,
    modalities=("text",),
    outputs=("text", "embedding"),
)
ORIGIN = "g-test"
MESSAGES = [{"role": "user", "content": "What does len do?"}]
CHAT = {"model": "demo", "messages": MESSAGES}


@dataclass
class Performance:
    """The answer to one submission, written by a script."""

    server: MemoryStore
    subjects: Subjects
    event: RequestSubmitted
    seq: int
    transcript: Transcript = field(default_factory=Transcript)
    tokens: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False
    is_admitted: bool = False

    @property
    def request_id(self) -> str:
        assert self.event.request_id is not None
        return self.event.request_id

    def chunk(
        self,
        text: str,
        token_ids: Sequence[int] = (1,),
        logprobs: list[TokenLogprobs] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> OutputChunk:
        index = self.transcript.next_index
        chunk = OutputChunk(
            id=f"{self.request_id}.{index}",
            writer="w0",
            request_id=self.request_id,
            attempt=1,
            index=index,
            text=text,
            token_ids=list(token_ids),
            logprobs=logprobs,
            metadata=metadata or {},
        )
        self.transcript.fold(chunk)
        self.tokens += len(token_ids)
        return chunk

    def say(self, text: str, token_ids: Sequence[int] = (1,)) -> None:
        self.output(self.chunk(text, token_ids))

    def say_tokens(self, text: str, tokens: list[TokenLogprobs]) -> None:
        self.output(self.chunk(text, [token.id for token in tokens], tokens))

    def say_prompt(self, text: str, tokens: list[TokenLogprobs] | None = None) -> None:
        self.output(self.chunk(text, [], tokens, metadata={"echo": True}))

    def sound(self, pcm: bytes, track: str = "") -> None:
        """Send audio: 16-bit samples at 24 kHz."""
        said = self.transcript.track(track)
        chunk = OutputChunk(
            id=f"{self.request_id}.{track}.{said.next_index}",
            writer="w0",
            request_id=self.request_id,
            attempt=1,
            index=said.next_index,
            modality="audio",
            data=pcm,
            metadata={"dtype": "int16", "shape": [len(pcm) // 2], "sample_rate": 24000, "num_channels": 1},
            track=track,
        )
        self.transcript.fold(chunk)
        self.output(chunk)

    def value(self, modality: str, data: bytes, metadata: dict[str, Any], *, advisory: bool = False) -> None:
        """Send bytes of a modality; as advice, if they are no part of the answer."""
        index = -1 if advisory else self.transcript.next_index
        chunk = OutputChunk(
            id=f"{self.request_id}.{modality}.{index}.{len(self.server.records)}",
            writer="w0",
            request_id=self.request_id,
            attempt=1,
            index=index,
            modality=modality,
            data=data,
            metadata=metadata,
            advisory=advisory,
        )
        self.transcript.fold(chunk)
        self.output(chunk)

    def vector(self, numbers: Sequence[float]) -> None:
        """Send an embedding."""
        chunk = OutputChunk(
            id=f"{self.request_id}.vector",
            writer="w0",
            request_id=self.request_id,
            attempt=1,
            index=0,
            modality="embedding",
            data=struct.pack(f"<{len(numbers)}f", *numbers),
            metadata={"dtype": "float32", "shape": [len(numbers)]},
        )
        self.transcript.fold(chunk)
        self.output(chunk)

    def output(self, event: Event) -> None:
        if not self.is_admitted:
            self.is_admitted = True
            self.walk(admitted(self.request_id))
        subject = self.subjects.output(self.event.origin, self.request_id, event.writer)
        self.server.append(subject, encode(event))

    def walk(self, event: Event) -> None:
        self.server.append(self.subjects.walk(self.request_id), encode(event))

    def finish(
        self,
        reason: str = "stop",
        totals: OutputTotals | None = None,
        *,
        cached_tokens: int = 0,
        counts: dict[str, int] | None = None,
        reasoning_tokens: int = 0,
        stopped_by: str | int | None = None,
    ) -> None:
        self.has_ended = True
        usage = Usage(
            prompt_tokens=7,
            completion_tokens=self.tokens,
            cached_tokens=cached_tokens,
            counts=counts or {},
            reasoning_tokens=reasoning_tokens,
        )
        self.walk(
            RequestFinished(
                writer=CONDUCTOR_WRITER,
                epoch=1,
                usage=usage,
                finish_reasons=[reason],
                stop_reasons=[] if stopped_by is None else [stopped_by],
                output=totals or self.transcript.totals,
                history=b"",
            )
        )

    def fail(self, failure: Failure) -> None:
        self.has_ended = True
        self.walk(RequestFailed(writer=CONDUCTOR_WRITER, epoch=1, failure=failure, history=b""))

    async def keep_limit(self) -> None:
        """Fail after the time limit, as a conductor does."""
        await asyncio.sleep(self.event.timeout_s or 0)
        if not self.has_ended:
            message = f"it took longer than its {self.event.timeout_s:g} s"
            self.fail(Failure(code="deadline_exceeded", message=message, status=504))

    def reject(self, failure: Failure, submission_seq: int | None = None) -> None:
        seq = self.seq if submission_seq is None else submission_seq
        self.walk(RequestRejected(writer=CONDUCTOR_WRITER, epoch=1, failure=failure, submission_seq=seq))


Script = Callable[[Performance], Awaitable[None]]


async def echo(performance: Performance) -> None:
    """Answer with the words of the prompt, one chunk each."""
    inputs = performance.event.inputs
    text = inputs.text if inputs.text is not None else ""
    if inputs.messages is not None:
        text = str(inputs.messages[-1]["content"])
    for number, word in enumerate(text.split(" ")):
        performance.say(word if not number else f" {word}", [number])
        await asyncio.sleep(0)
    performance.finish()


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        body = json.loads(fields["data"])
        assert fields["event"] == body["type"]
        found.append(body)
    return found


@dataclass
class World:
    """A deployment for a test."""

    server: MemoryStore
    subjects: Subjects
    gateway: Gateway
    client: httpx.AsyncClient
    script: Script
    app: GatewayApp
    batches: LiveBatches
    second: SecondLog
    media: MediaStore = field(default_factory=MemoryMediaStore)
    performances: dict[str, Performance] = field(default_factory=dict)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    regressed: asyncio.Event = field(default_factory=asyncio.Event)

    def events(self, *kinds: str) -> list[Event]:
        """All events on the log on subjects of these kinds."""
        found: list[Event] = []
        for record in self.server.records:
            address = self.subjects.parse(record.subject)
            if address is not None and address.kind in kinds:
                found.append(decode(record.data))
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the other tasks run until `condition` holds."""
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)

    async def stored(self, kind: str) -> list[Event]:
        """The events on subjects of this kind, once there is one."""
        async with aclosing(MemoryLog(self.server).read([f"{self.subjects.prefix}.{kind}.>"], 1)) as records:
            await anext(records)
        return self.events(kind)

    async def performance(self, number: int = 0) -> Performance:
        """The performance of the submission `number`, once it has begun."""
        async with self.news:
            await self.news.wait_for(lambda: len(self.performances) > number)
        return list(self.performances.values())[number]

    async def perform(self, *, keeps_limits: bool = True) -> None:
        """Answer every first submission by the script, apply every cancel, and enforce time limits."""
        watched = [self.subjects.request("*"), self.subjects.control("*")]
        async with asyncio.TaskGroup() as tasks, aclosing(MemoryLog(self.server).read(watched, 1)) as records:
            async for record in records:
                try:
                    address = self.subjects.parse(record.subject)
                    event = decode(record.data, address.kind if address else None)
                except MalformedEventError:
                    continue
                if isinstance(event, RequestSubmitted) and event.request_id not in self.performances:
                    performance = Performance(self.server, self.subjects, event, record.seq)
                    async with self.news:
                        self.performances[performance.request_id] = performance
                        self.news.notify_all()
                    tasks.create_task(self._play(performance))
                    if keeps_limits and event.timeout_s is not None:
                        tasks.create_task(performance.keep_limit())
                elif isinstance(event, RequestSubmitted) and event.is_first:
                    known = self.performances[event.request_id or ""]
                    known.reject(Failure(code="request_expired", message="gone", status=410), record.seq)
                elif isinstance(event, RequestCancel):
                    cancelled = self.performances[event.request_id or ""]
                    cancelled.walk(
                        RequestCancelled(writer=CONDUCTOR_WRITER, epoch=1, reason=event.reason, history=b"")
                    )
                    cancelled.has_ended = True
                    cancelled.cancelled.set()

    async def _play(self, performance: Performance) -> None:
        await self.script(performance)

    async def follow(self) -> None:
        """Follow the log until it is replaced."""
        try:
            await self.gateway.follower.follow(MemoryLog(self.server), self.media)
        except* LogRegressedError:
            self.regressed.set()


def beat(world: World, role: str, name: str, state: str, **facts: object) -> None:
    """Send a heartbeat as the process would."""
    payload = msgspec.msgpack.encode({"state": state, **facts})
    world.gateway.liveness.receive(
        world.subjects.heartbeat(role, name), payload, asyncio.get_running_loop().time()
    )


@asynccontextmanager
async def deployment(
    script: Script = echo,
    *,
    worker_joined: bool = True,
    max_body_bytes: int = 1 << 20,
    performing: bool = True,
    keeps_limits: bool = True,
    settings: GatewaySettings | None = None,
    keys: Sequence[ApiKey] = (),
    logs_requests: bool = True,
    served: ServedModel = SERVED,
    media: MediaSettings | None = None,
    tool_calls: str = "",
    reasoning: str = "",
) -> AsyncIterator[World]:
    """A gateway on a log in memory; `script` answers its requests."""
    settings = settings or GatewaySettings(max_body_bytes=max_body_bytes)
    subjects = Subjects()
    store = MemoryStore(subjects)
    if worker_joined:
        joined = WorkerJoined(
            writer="w0",
            rank=0,
            model="decoder_lm",
            nodes=[],
            device="cpu",
            tool_calls=tool_calls,
            reasoning=reasoning,
        )
        store.append(subjects.worker(0), encode(joined))
    gateway = Gateway(served, subjects, ORIGIN, settings, media)
    batches, second = LiveBatches(), SecondLog()
    second.connected(MemoryLog(store))
    app = create_app(gateway, keys, batches=batches, second=second, logs_requests=logs_requests)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client:
        client.event_hooks = {"response": [check.check_read]}  # OpenAI's schema
        world = World(store, subjects, gateway, client, script, app, batches, second)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(world.follow())
            performing_task = (
                tasks.create_task(world.perform(keeps_limits=keeps_limits)) if performing else None
            )
            await gateway.follower.followed.wait()
            yield world
            following.cancel()
            if performing_task is not None:
                performing_task.cancel()


@asynccontextmanager
async def listening(world: World, keys: Sequence[ApiKey] = ()) -> AsyncIterator[str]:
    """Serve the world's gateway on a real socket; yields the URL."""
    listener = server.bind("127.0.0.1", 0)
    url = server.url_of(listener)
    app = create_app(world.gateway, keys, batches=world.batches, second=world.second)
    settings = world.gateway.settings
    async with server.serving(
        app,
        listener,
        settings,
        websockets=serves_actions(world.gateway),
        on_refusal=unread(world.gateway.refusals.add),
    ):
        yield url
