import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from dalsegno import AsyncClient, ClientError
from dalsegno.client import (
    ConflictError,
    NotFoundError,
    RequestCancelledError,
    RequestExpiredError,
    UnreachableError,
)
from dalsegno.client.nats_transport import NatsTransport
from shared.events import (
    Failure,
    Inputs,
    OutputChunk,
    OutputFence,
    Params,
    RequestCancel,
    RequestCancelled,
    RequestSubmitted,
    TokenLogprobs,
    WorkerJoined,
    decode,
    encode,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.media.memory import MemoryMediaStore
from shared.subjects import CONDUCTOR_WRITER, Subjects
from tests.gateway.world import Performance, Script, echo

SUBJECTS = Subjects()


def chunk(index: int, text: str = "", attempt: int = 1, **more: Any) -> OutputChunk:
    return OutputChunk(writer="w0", index=index, text=text, attempt=attempt, **more)


class Stage:
    """A log in memory whose requests are answered by a script."""

    def __init__(self, script: Script, models: tuple[str, ...]) -> None:
        self.server = MemoryStore(SUBJECTS)
        self.media = MemoryMediaStore()
        self.script = script
        self.cancelled: asyncio.Queue[RequestCancel] = asyncio.Queue()
        for rank, model in enumerate(models):
            joined = WorkerJoined(writer=f"w{rank}", rank=rank, model=model, nodes=[], device="cpu")
            self.server.append(SUBJECTS.worker(rank), encode(joined))

    @property
    def submitted(self) -> list[RequestSubmitted]:
        events = [decode(record.data) for record in self.server.records]
        return [event for event in events if isinstance(event, RequestSubmitted)]

    async def perform(self) -> None:
        watched = [SUBJECTS.request("*"), SUBJECTS.control("*")]
        async with asyncio.TaskGroup() as tasks:
            async for record in MemoryLog(self.server).read(watched, 1):
                event = decode(record.data)
                if isinstance(event, RequestSubmitted):
                    performance = Performance(self.server, SUBJECTS, event, record.seq)
                    tasks.create_task(self._play(performance))
                elif isinstance(event, RequestCancel):
                    self.cancelled.put_nowait(event)

    async def _play(self, performance: Performance) -> None:
        await self.script(performance)


@asynccontextmanager
async def stage(
    script: Script = echo, models: tuple[str, ...] = ("demo",)
) -> AsyncIterator[tuple[Stage, AsyncClient]]:
    """The log, and a client of it."""
    it = Stage(script, models)
    async with asyncio.TaskGroup() as tasks:
        performing = tasks.create_task(it.perform())
        async with AsyncClient("nats://log") as client:
            client._transport = NatsTransport(
                "nats://log", log=MemoryLog(it.server), media=MemoryMediaStore(it.media.memory)
            )
            yield it, client
        performing.cancel()


async def test_the_request_is_the_event_and_the_answer_is_the_logs() -> None:
    async with stage() as (it, client):
        answer = await client.generate("one two", request_id="mine", max_tokens=3)

    [event] = it.submitted
    assert (event.request_id, event.model, event.origin) == ("mine", "demo", "nats")
    assert (event.inputs, event.params) == (Inputs(text="one two"), Params(max_tokens=3))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("one two", [0, 1], "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


async def test_files_are_in_the_media_store_before_their_request_is_in_the_log() -> None:
    async def draw(performance: Performance) -> None:
        [image] = performance.event.inputs.files
        data = b"".join([piece async for piece in it.media.read(image.digest, tenant=None)])
        picture = chunk(0, modality="image", data=data, metadata={"width": 2})
        performance.transcript.fold(picture)
        performance.output(picture)
        performance.finish()

    async with stage(draw) as (it, client):
        answer = await client.generate("again", images=("cat.png", b"pixels"), output_modalities=["image"])

    [event] = it.submitted
    assert event.inputs.input_modalities == ["image", "text"]
    assert b"pixels" not in encode(event)
    assert (answer.images[0].data, answer.images[0].metadata) == (b"pixels", {"width": 2})


async def test_the_tokens_of_an_echo_are_the_prompts() -> None:
    async def script(performance: Performance) -> None:
        for told in (
            chunk(
                0,
                "hi ",
                metadata={"echo": True, "token_ids": [7]},
                logprobs=[TokenLogprobs(id=7, token=b"h")],
            ),
            chunk(1, "a", token_ids=[8], logprobs=[TokenLogprobs(id=8, token=b"a", logprob=-0.5)]),
        ):
            performance.transcript.fold(told)
            performance.output(told)
        performance.finish()

    async with stage(script) as (_, client):
        answer = await client.generate("hi", echo=True, logprobs=0)

    assert (answer.text, answer.token_ids, answer.prompt_token_ids) == ("hi a", [8], [7])
    assert answer.logprobs == [TokenLogprobs(id=8, token=b"a", logprob=-0.5)]
    assert answer.prompt_logprobs == [TokenLogprobs(id=7, token=b"h")]


async def test_a_service_that_was_killed_reads_on_from_where_it_was_and_nothing_is_run_again() -> None:
    async with stage() as (it, client):
        await client.generate("one two three", request_id="mine", timeout_s=7)
        async with AsyncClient("nats://log") as again:
            again._transport = NatsTransport(
                "nats://log", log=MemoryLog(it.server), media=MemoryMediaStore(it.media.memory)
            )
            rest = await again.resume("mine", "one two three", after=0).read()
            assert rest.text == " two three"
            it.server.forget(len(it.server.records))
            with pytest.raises(RequestExpiredError):
                await again.resume("mine", "one two three", after=0).read()

    [event] = it.submitted
    assert (event.timeout_s, event.is_first) == (7, True)


async def test_the_death_of_a_worker_is_not_seen() -> None:
    async def die_and_go_on(performance: Performance) -> None:
        performance.output(chunk(0, "one"))
        performance.output(chunk(2, " lost"))  # early, and void from the fence on
        performance.output(
            OutputFence(writer=CONDUCTOR_WRITER, epoch=1, attempt=2, reason="w0 died", history=b"")
        )
        performance.output(chunk(1, " late"))  # from the dead worker, stored after its fence
        for told in (chunk(1, " two", attempt=2), chunk(1, " two", attempt=2), chunk(2, "!", attempt=2)):
            performance.output(told)
        for told in (chunk(0, "one"), chunk(1, " two", attempt=2), chunk(2, "!", attempt=2)):
            performance.transcript.fold(told)
        performance.finish()

    async with stage(die_and_go_on) as (_, client):
        answer = await client.generate("hi")

    assert (answer.text, answer.finish_reason) == ("one two!", "stop")


async def test_an_id_that_was_answered_gives_the_answer_again_behind_any_chunk() -> None:
    async with stage() as (it, client):
        await client.generate("one two three", request_id="mine")
        again = await client.generate("one two three", request_id="mine")
        async with client.resume("mine", "one two three", after=0) as stream:
            rest = [(chunk.index, chunk.text) async for chunk in stream]

    assert again.text == "one two three"
    assert rest == [(1, " two"), (2, " three")]
    assert len(it.submitted) == 1


async def test_an_id_of_another_request_is_a_conflict() -> None:
    async with stage() as (it, client):
        await client.generate("one", request_id="mine")
        with pytest.raises(ConflictError) as caught:
            await client.generate("two", request_id="mine")

    assert (caught.value.code, caught.value.status) == ("request_id_conflict", 409)
    assert len(it.submitted) == 1


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure(code="context_length_exceeded", message="too long", status=400), ClientError),
        (Failure(code="model_not_found", message="none", status=404), NotFoundError),
    ],
)
async def test_a_failure_is_an_error_of_its_kind(failure: Failure, kind: type[ClientError]) -> None:
    async def fail(performance: Performance) -> None:
        performance.fail(failure)

    async def reject(performance: Performance) -> None:
        performance.reject(failure)

    for script in (fail, reject):
        async with stage(script) as (it, client):
            with pytest.raises(kind) as caught:
                await client.generate("hi")
            assert it.cancelled.empty()
        told = caught.value
        assert (told.code, told.status, told.message) == (failure.code, failure.status, failure.message)


async def test_leaving_a_stream_cancels() -> None:
    async def hang(performance: Performance) -> None:
        performance.say("one")

    async with stage(hang) as (it, client):
        async with client.stream("hi", request_id="mine") as stream:
            await anext(stream)
        cancel = await it.cancelled.get()

    assert cancel.request_id == "mine"


async def test_a_cancel_by_hand_ends_the_stream() -> None:
    async def hang(performance: Performance) -> None:
        performance.say("one")

    async with stage(hang) as (it, client):
        stream = client.stream("hi", request_id="mine")
        await anext(stream)
        await client.cancel("mine")
        [event] = it.submitted
        performance = Performance(it.server, SUBJECTS, event, 2)
        reason = (await it.cancelled.get()).reason
        performance.walk(RequestCancelled(writer=CONDUCTOR_WRITER, epoch=1, reason=reason, history=b""))
        with pytest.raises(RequestCancelledError):
            await anext(stream)


async def test_the_models_are_those_of_the_workers() -> None:
    async with stage(models=("demo", "demo")) as (_, client):
        assert await client.models() == ["demo"]


async def test_without_a_worker_there_is_no_model_to_ask() -> None:
    async with stage(models=()) as (it, client):
        assert await client.models() == []
        with pytest.raises(UnreachableError, match="no worker has been ready yet"):
            await client.generate("hi")

    assert it.submitted == []


async def test_health_is_what_the_beats_say() -> None:
    async with stage() as (it, client), asyncio.TaskGroup() as tasks:

        async def beats() -> None:
            while True:
                told = {"conductor.c": {"state": "leading"}, "worker.0": {"state": "ready"}}
                for name, beat in told.items():
                    role, _, who = name.partition(".")
                    it.server.broadcast(SUBJECTS.heartbeat(role, who), msgspec.msgpack.encode(beat))
                await asyncio.sleep(0)

        beating = tasks.create_task(beats())
        health = await client.health()
        beating.cancel()

    assert (health.is_ready, health.missing) == (True, ())


@pytest.mark.slow
async def test_without_beats_health_says_who_is_missing() -> None:
    async with stage() as (_, client):
        health = await client.health()

    assert not health.is_ready
    assert health.missing == ("no conductor leads", "the worker of rank 0 sends no heartbeats")
