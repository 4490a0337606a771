"""The client on real deployments: equal calls and answers over HTTP and NATS, whatever process dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from dalsegno import Answer, AsyncClient, Client, ClientError
from dalsegno.client import ConflictError, NotFoundError, RequestCancelledError
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

QUESTION: Final = "What does len do?"
ANSWER: Final = "Return the number of items in a container."
STORY: Final = "Tell me a long story about a wizard."
TOKENS: Final = 300
WAYS: Final = ("http", "nats")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A deployment whose roles are killed: random weights, and answers as long as requested."""
    with deploy.serve(tmp_path_factory.mktemp("client"), model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


def client_of(running: Running, way: str) -> AsyncClient:
    if way == "http":
        return AsyncClient(running.url)
    return AsyncClient(running.nats_url, credentials=running.client, prefix=running.prefix)


async def story(running: Running, way: str, request_id: str) -> Answer:
    """The text of an undisturbed answer."""
    async with client_of(running, way) as client:
        return await client.generate(
            STORY, request_id=request_id, temperature=0, max_tokens=TOKENS, ignore_eos=True
        )


# ---- the same over both ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_the_model_answers(way: str, deployment: Running) -> None:
    async with client_of(deployment, way) as client:
        health, models = await client.health(), await client.models()
        answer = await client.generate(QUESTION, temperature=0)
        chat = await client.chat([{"role": "user", "content": QUESTION}], temperature=0)
        streamed = [chunk.text async for chunk in client.stream(QUESTION, temperature=0)]

    assert (health.is_ready, health.missing, models) == (True, (), ["demo"])
    assert (answer.text, answer.finish_reason) == (ANSWER, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(answer.token_ids)
    assert (chat.text, chat.token_ids) == (answer.text, answer.token_ids)
    assert "".join(streamed) == ANSWER


@pytest.mark.parametrize("way", WAYS)
async def test_log_probabilities_and_an_echo_come_with_it(way: str, deployment: Running) -> None:
    async with client_of(deployment, way) as client:
        answer = await client.generate("len:", chat=False, max_tokens=4, temperature=0, logprobs=2, echo=True)

    assert answer.text.startswith("len:")
    assert answer.logprobs is not None
    assert answer.prompt_logprobs is not None
    assert [token.id for token in answer.logprobs] == answer.token_ids
    assert [token.id for token in answer.prompt_logprobs] == answer.prompt_token_ids
    assert all(len(token.top) == 2 for token in answer.logprobs)
    assert b"".join(token.token for token in answer.logprobs).decode() == answer.text.removeprefix("len:")


@pytest.mark.parametrize(("asked", "resumed"), [WAYS, WAYS[::-1]])
async def test_what_was_asked_over_one_is_taken_up_over_the_other(
    asked: str, resumed: str, deployment: Running
) -> None:
    request_id = f"over-{asked}"
    async with client_of(deployment, asked) as client:
        chunks = [chunk async for chunk in client.stream(QUESTION, request_id=request_id, temperature=0)]
    async with client_of(deployment, resumed) as client:
        rest = client.resume(request_id, QUESTION, after=chunks[1].index, temperature=0)
        assert [chunk async for chunk in rest] == chunks[2:]
        assert rest.answer.finish_reason == "stop"
        with pytest.raises(ConflictError):
            await client.generate("What does zip do?", request_id=request_id)


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_wrong_is_an_error_that_says_so(way: str, deployment: Running) -> None:
    async with client_of(deployment, way) as client:
        with pytest.raises(NotFoundError) as unknown:
            await client.generate("hi", model="none")
        with pytest.raises(ClientError) as refused:
            await client.generate("hi", images=b"\x89PNG\r\n\x1a\n")
        with pytest.raises(ClientError) as too_long:
            await client.generate("hi " * 5000)

    assert (unknown.value.code, unknown.value.status) == ("model_not_found", 404)
    assert (refused.value.code, refused.value.status) == ("unsupported_modality", 400)
    assert (too_long.value.code, too_long.value.status) == ("context_length_exceeded", 400)


@asynccontextmanager
async def breaking(url: str) -> AsyncIterator[str]:
    """A proxy to `url` that breaks each connection after its first 1500 bytes of response."""
    host, port = url.removeprefix("http://").split(":")

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))

        async def forward() -> None:
            while data := await reader.read(65536):
                up_writer.write(data)

        async def answer() -> None:
            told = 0
            while told < 1500 and (data := await up_reader.read(500)):
                told += len(data)
                writer.write(data)
                await writer.drain()

        both = [asyncio.create_task(forward()), asyncio.create_task(answer())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # the test is over; asyncio would call it an error of the callback
        finally:
            for one in both:
                one.cancel()
            writer.transport.abort()
            up_writer.transport.abort()

    async with await asyncio.start_server(on_client, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def counted(answer: Answer) -> tuple[int, int]:
    """The tokens of an answer; how many of them were cached depends on the requests before."""
    assert answer.usage is not None
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


async def test_a_stream_over_a_network_that_breaks_is_whole(random_deployment: Running) -> None:
    undisturbed = await story(random_deployment, "http", "network-whole")
    async with breaking(random_deployment.url) as url, AsyncClient(url) as client:
        stream = client.stream(STORY, temperature=0, max_tokens=TOKENS, ignore_eos=True)
        answer = await stream.read()

    assert stream.resumed >= 2
    assert (answer.text, answer.token_ids) == (undisturbed.text, undisturbed.token_ids)
    assert counted(answer) == counted(undisturbed)


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_is_cancelled_by_its_id(way: str, random_deployment: Running) -> None:
    async with client_of(random_deployment, way) as client:
        stream = client.stream(STORY, request_id=f"cancel-{way}", max_tokens=400, ignore_eos=True)
        await anext(stream)
        await client.cancel(stream.request_id)
        with pytest.raises(RequestCancelledError):
            await stream.read()


def test_a_program_without_an_event_loop_asks_the_same(deployment: Running) -> None:
    for client in (
        Client(deployment.url),
        Client(deployment.nats_url, credentials=deployment.client, prefix=deployment.prefix),
    ):
        with client, client.stream(QUESTION, temperature=0) as stream:
            assert "".join(chunk.text for chunk in stream) == ANSWER


# ---- whoever dies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "killed"), [("http", "gateway"), ("nats", "worker"), ("nats", "conductor")])
async def test_a_stream_is_unbroken_whoever_dies(way: str, killed: str, running: Running) -> None:
    undisturbed = await story(running, way, f"undisturbed-{way}-{killed}")
    pids = running.pids
    pid = {"gateway": pids.gateway[0], "worker": pids.worker["0"], "conductor": pids.conductor[0]}[killed]
    async with client_of(running, way) as client:
        stream = client.stream(STORY, temperature=0, max_tokens=TOKENS, ignore_eos=True)
        indices = []
        async for chunk in stream:
            indices.append(chunk.index)
            if len(stream.answer.token_ids) > TOKENS // 4 and pid:
                os.kill(pid, signal.SIGKILL)
                assert len(stream.answer.token_ids) < TOKENS, "the kill came too late to disturb anybody"
                pid = 0
    await clients.wait_until_ready(running)

    assert pid == 0
    assert indices == list(range(len(indices)))
    answer = stream.answer
    assert (answer.text, answer.token_ids) == (undisturbed.text, undisturbed.token_ids)
    assert counted(answer) == counted(undisturbed)
    assert answer.finish_reason == "length"
    assert (stream.resumed > 0) == (killed == "gateway")
