"""Every key of the configuration changes something that can be seen, and each is in the table.

A row says a key by its environment variable, so the whole way is gone: environment, layers, the struct, and
the part that acts on it. What is observed without and with it is written down.
"""

import asyncio
import contextlib
import io
import logging
import os
import random
import re
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
import msgspec
import pytest

from conductor import process as conductor_process
from conductor.deployment import deployment_of
from conductor.sealing.assembly import sealer_of
from conductor.sealing.places import place_of
from conductor.snapshots import Snapshots
from configs import seal_keys
from configs.deployment import ConfigError, DeploymentConfig
from configs.files import Base
from configs.nats_access import stream_policy
from configs.secrets import api_keys
from dalsegno.config import layers, resolve
from dalsegno.config.address import Listen
from dalsegno.config.layers import KEYS
from dalsegno.roles import logging_setup, role_process
from dalsegno.serve import data_dir, role_commands, role_imports
from dalsegno.serve.options import ServeOptions
from gateway import app as gateway_app
from gateway.app import GatewayOptions
from gateway.requests.service import Gateway
from gateway.served_model import ServedModel
from models import registry
from models.media.kinds import VideoInfo
from shared.errors import ClientError
from shared.events import (
    EpochOpened,
    LogSealed,
    Media,
    NodeReady,
    Params,
    RequestAdmitted,
    RequestRejected,
    WorkerLost,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.nats import jetstream, nkeys
from shared.log.nats.reader_watch import ReaderWatch
from shared.log.port import LogUnavailableError
from shared.sealing.keys import SigningKey
from shared.subjects import Subjects
from shared.telemetry import tracing
from shared.telemetry.log_fields import PROMPT
from tests.collector import collecting
from tests.conductor.script import SUBJECTS, Script
from tests.conductor.shell import Watcher, beating, conducting, join, until_it_says
from tests.gateway.batches import running as batches
from tests.gateway.http.test_connection import GET, HALF, Client, Endless, serving
from tests.gateway.media.world import chat, data_url, image, png, seeing
from tests.gateway.world import CHAT, SERVED, Performance, World, deployment, echo, listening
from tests.models.media import samples
from tests.tiny import tiny_checkpoint
from tests.tiny.adapters import make_adapter
from tests.tiny.orpheus import tiny_orpheus
from workers import settings
from workers.data_plane.port import TensorStore
from workers.data_plane.transports.tcp import TcpEndpoint
from workers.loading.engines import adapter_bytes
from workers.loading.tensor_store import open_tensors
from workers.machine.devices import choose_device
from workers.media.assembly import decoders_of
from workers.media.decoders import Decoders
from workers.media.reader import DecodingReader

Observe: TypeAlias = Callable[[DeploymentConfig], Awaitable[object]]

PATIENCE_S: Final = 0.3
"""For how long is waited for what shall not happen: a timeout that is not reached has no effect yet."""
CHAT_PATH: Final = "/v1/chat/completions"


async def whether_the_log_is_sealed(config: DeploymentConfig) -> bool:
    return await sealer_of(config, MemoryLog(MemoryStore()), SUBJECTS) is not None


async def the_name_of_the_key_file(config: DeploymentConfig) -> str:
    return Path(seal_keys.signing_key(config.sealing).source).name


async def whether_the_key_is_the_given_one(config: DeploymentConfig) -> bool:
    return seal_keys.signing_key(config.sealing).key.public == SigningKey("11" * 32).public


async def whether_another_key_is_trusted(config: DeploymentConfig) -> bool:
    return bytes.fromhex("22" * 32) in seal_keys.trusted_keys(config.sealing)


async def whether_seals_come_at_intervals(config: DeploymentConfig) -> bool:
    store = MemoryStore()
    log = MemoryLog(store)
    sealer = await sealer_of(config, log, SUBJECTS)
    async with conducting(log, sealer=sealer):
        watcher = Watcher(store)
        await watcher.until(EpochOpened)
        await watcher.until(LogSealed)
        await join(log)
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await watcher.until(LogSealed)
        except TimeoutError:
            return False
        return True


async def the_folder_of_the_anchors(config: DeploymentConfig) -> str:
    return seal_keys.anchor_file(config.sealing, "S", 1).parent.name


async def the_places_of_anchors(config: DeploymentConfig) -> list[str]:
    return [place_of(url).name for url in config.sealing.anchors]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One key and its effect.

    Attributes:
        said: its variable's value; made in a folder of the test's own, where it names a file there.
        without: what is observed where nothing is said, or `otherwise`.
        with_: what is observed once it is said.
        also: what is said of other keys, both times.
    """

    key: str
    said: str | Callable[[Path], str]
    observe: Observe
    without: object
    with_: object
    otherwise: str = ""
    also: Mapping[str, str] = field(default_factory=dict)


def configured(environ: Mapping[str, str]) -> DeploymentConfig:
    base = Base(
        values={
            "model": "decoder_lm",
            "checkpoint": str(tiny_checkpoint("qwen3")),
            "max_seq_len": 64,
            "node_groups": [{"node_names": ["prepare", "llm"], "ranks": [0]}],
        },
        source="tiny.yaml",
        folder=Path(),
        name="tiny",
    )
    return layers.effective(base, layers.of_environment(environ), Path("/here")).config


# ---- what is decided ---------------------------------------------------------------------------------


def conducted(config: DeploymentConfig, requests: int = 1, **fields: Any) -> Script:
    """A conductor's history: a worker of a pool of 128 tokens, and requests for as much as they get."""
    script = Script(serve=deployment_of(config, max_event_bytes=1 << 20))
    script.open_epoch()
    for rank in config.ranks:
        script.join(f"w{rank}-a", rank)
    for number in range(requests):
        script.submit(f"r{number + 1}", **{"model": "tiny", "params": Params()} | fields)
    return script


async def tokens_granted(config: DeploymentConfig) -> int:
    script = conducted(config)
    script.complete(script.last(NodeReady))
    granted = script.last(NodeReady).walks[1].args["max_tokens"]
    assert isinstance(granted, int)
    return granted


async def family_admitted(config: DeploymentConfig) -> object:
    return conducted(config).last(RequestAdmitted).family


async def the_models_of_adapters(config: DeploymentConfig) -> list[str]:
    return sorted(ServedModel.of(config).adapter_models)


async def whether_adapters_are_loaded_at_run_time(config: DeploymentConfig) -> bool:
    return ServedModel.of(config).adapters.takes_others


async def the_memory_of_adapters(config: DeploymentConfig) -> int:
    return adapter_bytes(config)


async def voice_of_an_example(config: DeploymentConfig) -> str:
    return ServedModel.of(config).voices[0]


async def how_many_are_admitted(config: DeploymentConfig) -> int:
    return len(conducted(config, requests=2).events(RequestAdmitted))


async def answer_to_a_request_for_tiny(config: DeploymentConfig) -> str:
    return conducted(config).kinds()[-1]


async def what_follows_a_workers_death(config: DeploymentConfig) -> str:
    script = conducted(config)
    script.join("w0-b")
    return script.kinds()[-1]


async def time_limits_of_a_step(config: DeploymentConfig) -> list[float]:
    """How long the step under way may take."""
    script = conducted(config)
    since_ns = script.request().running[0].since_ns
    return [(deadline.at_ns - since_ns) / 1e9 for deadline in script.cluster.deadlines()]


async def where_three_requests_run(config: DeploymentConfig) -> list[int]:
    """One after the other, each done before the next comes."""
    script = conducted(config, requests=0)
    for name in ("a", "b", "c"):
        script.submit(name, model=config.name)
        script.run_to_the_end(name)
    return [script.request(name).placement["llm"] for name in ("a", "b", "c")]


async def how_many_of_four_run(config: DeploymentConfig) -> int:
    script = conducted(config, requests=4)
    return len(script.events(RequestAdmitted))


async def how_many_of_four_are_turned_away(config: DeploymentConfig) -> int:
    script = conducted(config, requests=4)
    return len(script.events(RequestRejected))


async def what_share_the_second_gets(config: DeploymentConfig) -> float:
    script = conducted(config, requests=2)
    return float(script.events(RequestAdmitted)[-1].limits.max_tokens_share)


# ---- where and how it is computed --------------------------------------------------------------------


async def prompt_tokens_of_hello(config: DeploymentConfig) -> object:
    """Tokenizer and chat template are the checkpoint's."""
    face = registry.module(config.model, "processing").load(Path(config.checkpoint), max_seq_len=64)
    asked_for = {"inputs": {"messages": [{"role": "user", "content": "hello"}]}, "params": {}}
    return face.run("prepare", "r1", {}, asked_for).facts["prompt_tokens"]


async def rows_of_a_step(config: DeploymentConfig) -> int:
    return settings.parse(config.model_kwargs).max_sequences_on("cpu")


def started(config: DeploymentConfig) -> list[str]:
    told = ServeOptions(model="tiny", settings=(), ready_file=None)
    listens = [Listen(host="127.0.0.1", port=8000 + number) for number in range(config.recovery.gateways)]
    return [one.name for one in role_commands.commands(told, config, listens, "nats://127.0.0.1:4222", None)]


async def the_gateways_that_are_started(config: DeploymentConfig) -> list[str]:
    return [name for name in started(config) if name.startswith("gateway")]


async def the_worker_that_is_started(config: DeploymentConfig) -> str:
    return started(config)[0]


async def the_roles_with_a_template(config: DeploymentConfig) -> list[str]:
    return sorted(role_imports.of_roles(config))


async def where_the_log_is_kept(config: DeploymentConfig) -> bool:
    return data_dir.of_deployment(config).path == Path("/here/data")


# ---- how tensors go from worker to worker ------------------------------------------------------------


async def the_device_of_rank_0(config: DeploymentConfig) -> str:
    try:
        return choose_device(config, 0).type
    except ConfigError:
        return "is not there"


@contextlib.asynccontextmanager
async def store(config: DeploymentConfig, rank: int = 0) -> AsyncIterator[TensorStore]:
    found = open_tensors(config, rank)
    try:
        yield found
    finally:
        await found.close()


async def bytes_of_an_arena(config: DeploymentConfig) -> int:
    async with store(config) as found:
        return found.stats().total_bytes


async def whether_an_arena_has_a_name(config: DeploymentConfig) -> bool:
    return "shm_named" in await cards(config)


async def cards(config: DeploymentConfig) -> set[str]:
    async with store(config) as found:
        return set(found.endpoints)


async def where_rank_1_is_reached(config: DeploymentConfig) -> tuple[str, int]:
    async with store(config, rank=1) as found:
        card = msgspec.msgpack.decode(found.endpoints["tcp"], type=TcpEndpoint)
    return card.address, card.port


async def the_address_of_rank_1(config: DeploymentConfig) -> str:
    return (await where_rank_1_is_reached(config))[0]


async def whether_rank_1_is_at_the_next_port(config: DeploymentConfig) -> bool:
    return (await where_rank_1_is_reached(config))[1] == config.data_plane.port + 1


# ---- who counts as dead ------------------------------------------------------------------------------


async def comes(what: Awaitable[object], within_s: float = 1.5) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await what
            return True
    return False


async def whether_a_silent_worker_is_given_up(config: DeploymentConfig) -> bool:
    server = MemoryStore(SUBJECTS)
    async with conducting(MemoryLog(server), recovery=config.recovery):
        await join(MemoryLog(server))
        return await comes(Watcher(server).until(WorkerLost))


async def whether_a_hung_worker_is(config: DeploymentConfig) -> bool:
    server = MemoryStore(SUBJECTS)
    log = MemoryLog(server)
    async with conducting(log, recovery=config.recovery), beating(log, await join(log), running=1):
        return await comes(Watcher(server).until(WorkerLost))


async def whether_a_silent_leader_is_followed_by_another(config: DeploymentConfig) -> bool:
    server = MemoryStore(SUBJECTS)
    watcher, doomed = Watcher(server), MemoryLog(server)
    async with conducting(doomed, "c1", config.recovery):
        await watcher.until(EpochOpened)
        async with conducting(MemoryLog(server), "c2", config.recovery):
            await until_it_says(MemoryLog(server), "c2", "following")
            await doomed.close()
            return await comes(watcher.until(EpochOpened))


async def the_conductors_that_are_started(config: DeploymentConfig) -> list[str]:
    return [name for name in started(config) if name.startswith("conductor")]


async def whether_a_snapshot_is_written_soon(config: DeploymentConfig) -> bool:
    server = MemoryStore(SUBJECTS)
    log, written = MemoryLog(server), asyncio.Event()

    class Noted(Snapshots):
        async def write(self, *_: object) -> None:
            written.set()

    notes = Noted(Path("/nowhere"), fold_digest="")
    async with conducting(log, recovery=config.recovery, snapshots=notes):
        await join(log)
        return await comes(written.wait(), within_s=PATIENCE_S)


# ---- who joins which log -----------------------------------------------------------------------------


async def the_server_that_is_joined(config: DeploymentConfig) -> object:
    return resolve.nats_url(config) if config.nats.url is not None else "a private one"


async def the_subject_of_a_request(config: DeploymentConfig) -> str:
    return Subjects(role_process._common(config, "gateway")["prefix"]).request("r1")


async def the_token_that_is_shown(config: DeploymentConfig) -> object:
    return role_process._common(config, "gateway")["credentials"].token


async def the_password_that_is_shown(config: DeploymentConfig) -> object:
    shown = role_process._common(config, "gateway")["credentials"]
    return shown.user, shown.password


async def the_key_that_is_shown(config: DeploymentConfig) -> object:
    return role_process._common(config, "gateway")["credentials"].public_key


async def the_files_for_tls(config: DeploymentConfig) -> object:
    try:
        return role_process._common(config, "gateway")["credentials"].tls()
    except ClientError as error:
        return re.findall("no-[a-z]+", error.message)


def how_the_log_is_kept(name: str) -> Observe:
    """What the stream is made with; that it is made so is `tests.shared.log`'s."""

    async def observe(config: DeploymentConfig) -> object:
        return getattr(stream_policy(config.nats, config.media), name)

    return observe


async def readers_per_key(config: DeploymentConfig) -> object:
    """The limit that a conductor starts with; that it is kept is `tests.shared.log`'s."""
    limits: list[int] = []

    class Watch(ReaderWatch):
        def __init__(self, *_: object, max_consumers: int, per_key: int) -> None:
            limits.append(per_key)
            raise LogUnavailableError("seen")

    async def connect(*_: object, **__: object) -> object:
        return None

    options = conductor_process.ConductorOptions(config=config, nats_url="nats://127.0.0.1:1")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(LogUnavailableError):
        patch.setattr(conductor_process, "ReaderWatch", Watch)
        patch.setattr(jetstream, "connect", connect)
        await conductor_process.run(options)
    return limits[0]


# ---- what a gateway answers --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def gateway(config: DeploymentConfig, script: Any = echo) -> AsyncIterator[World]:
    async with deployment(
        script,
        settings=config.gateway,
        keys=api_keys(config.gateway),
        logs_requests=config.logs.requests,
        served=replace(SERVED, aliases=ServedModel.of(config).aliases),
    ) as world:
        yield world


async def asked(config: DeploymentConfig, **changed: Any) -> httpx.Response:
    async with gateway(config) as world:
        return await world.client.post(CHAT_PATH, json=CHAT | changed)


def status_of(**changed: Any) -> Observe:
    async def observe(config: DeploymentConfig) -> int:
        return (await asked(config, **changed)).status_code

    return observe


async def embeddings_status(config: DeploymentConfig) -> int:
    async def embed(performance: Performance) -> None:
        performance.vector([1.0])
        performance.finish()

    async with gateway(config, embed) as world:
        body = {"model": world.gateway.served.name, "input": ["a", "b"]}
        return (await world.client.post("/v1/embeddings", json=body)).status_code


async def rerank_status(config: DeploymentConfig) -> int:
    async def score(performance: Performance) -> None:
        performance.value("score", bytes(8), {"dtype": "float32", "shape": [2]})
        performance.finish()

    async with gateway(config, score) as world:
        served = replace(world.gateway.served, outputs=("score",), takes_texts=True)
        world.gateway.served = served
        body = {"query": "a", "documents": ["a", "b"]}
        return (await world.client.post("/v1/rerank", json=body)).status_code


def status_by_host(host: str) -> Observe:
    async def observe(config: DeploymentConfig) -> int:
        async with gateway(config) as world:
            return (await world.client.get("/v1/models", headers={"Host": host})).status_code

    return observe


def header(name: str) -> Observe:
    async def observe(config: DeploymentConfig) -> object:
        async with gateway(config) as world:
            answer = await world.client.get("/v1/models", headers={"Origin": "https://a.example"})
            return answer.headers.get(name)

    return observe


async def two_in_a_minute(config: DeploymentConfig) -> list[int]:
    async with gateway(config) as world:
        return [(await world.client.get("/v1/models")).status_code for _ in range(2)]


async def one_beside_another(config: DeploymentConfig) -> int:
    let_go = asyncio.Event()

    async def holds_the_first(performance: Performance) -> None:
        if len(world.performances) == 1:
            await let_go.wait()
        performance.finish()

    async with gateway(config, holds_the_first) as world, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(world.client.post(CHAT_PATH, json=CHAT))
        await world.performance()
        second = await world.client.post(CHAT_PATH, json=CHAT)
        let_go.set()
        assert (await first).status_code == 200
    return second.status_code


async def an_answer_that_does_not_come(config: DeploymentConfig) -> object:
    async def silent(performance: Performance) -> None:
        await performance.cancelled.wait()

    async with gateway(config, silent) as world, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(world.client.post(CHAT_PATH, json=CHAT))
        happened = await within(asking, config.gateway.request_timeout_s)
        asking.cancel()
        return asking.result().status_code if happened else "is waited for"


# ---- what it bears with on its sockets ---------------------------------------------------------------


async def within(event: "asyncio.Task[Any]", limit_s: float) -> bool:
    """Whether it happens: a short limit is waited for, however busy we are; a long one is not."""
    done, _ = await asyncio.wait({event}, timeout=60.0 if limit_s < 1 else PATIENCE_S)
    return bool(done)


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def after(sent: bytes, limit: str) -> Observe:
    """The status of what a client is told who goes no further; 0 is a connection that is still open."""

    async def observe(config: DeploymentConfig) -> int:
        async with gateway(config) as world, listening(world) as url, client_of(url) as client:
            await client.send(sent)
            if sent == GET:
                await client.answer()
            async with asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(client.reader.read(65536))
                happened = await within(ending, getattr(config.gateway, limit))
                ending.cancel()
            said = ending.result() if happened else b""
            return int(said.split()[1]) if said else (200 if happened else 0)

    return observe


async def a_second_connection(config: DeploymentConfig) -> int:
    async with (
        gateway(config) as world,
        listening(world) as url,
        client_of(url) as first,
        client_of(url) as second,
    ):
        for client in (first, second):
            await client.send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            status, _, _ = await client.answer()
        return status


async def a_client_that_takes_nothing(config: DeploymentConfig) -> str:
    app = Endless()
    async with (
        serving([], app, **msgspec.structs.asdict(config.gateway)) as served,
        served.client(65536) as client,
        asyncio.TaskGroup() as tasks,
    ):
        await client.send(GET)
        leaving = tasks.create_task(app.left.wait())
        happened = await within(leaving, config.gateway.send_timeout_s)
        leaving.cancel()
    return "is cut off" if happened else "is borne with"


# ---- the process -------------------------------------------------------------------------------------


async def ran(config: DeploymentConfig) -> tuple[str, list[float]]:
    """The URL of a gateway that was run and told to stop, and how long it was ready to wait for answers."""
    waited: list[float] = []

    async def drain(self: Gateway, deadline_s: float) -> bool:
        waited.append(deadline_s)
        return True

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Gateway, "drain", drain)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = GatewayOptions(config=config, nats_url="nats://127.0.0.1:1")
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(gateway_app.run(options, listening=url.set_result))
            found = await url
            running.cancel()
    return found, waited


async def the_host_it_listens_on(config: DeploymentConfig) -> str:
    return httpx.URL((await ran(config))[0]).host


async def whether_it_is_the_port(config: DeploymentConfig) -> bool:
    return httpx.URL((await ran(config))[0]).port == config.gateway.port


async def what_a_browser_gets(config: DeploymentConfig) -> str:
    """The type of what is at `/`."""
    async with deployment(settings=config.gateway) as world:
        response = await world.client.get("/", headers={"accept": "text/html"})
    return response.headers["content-type"].partition(";")[0]


async def how_many_lines_run(config: DeploymentConfig) -> int:
    """The lines of a batch that run at a time."""

    async def hold(performance: Performance) -> None:
        await performance.cancelled.wait()

    async with deployment(hold, settings=config.gateway) as world, batches.running(world):
        await batches.created(world, [batches.line(f"c{number}") for number in range(40)])
        await world.performance(config.gateway.batch_lines - 1)
        for _ in range(200):  # turns of the loop, in which a further one would begin
            await asyncio.sleep(0)
        return len(world.performances)


async def how_long_answers_may_go_on(config: DeploymentConfig) -> float:
    return (await ran(config))[1][0]


def a_free_port(_: Path) -> str:
    """A port that is free, as the next one is, and that the system gives to nobody who asks for any port."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return str(port)


# ---- what it says ------------------------------------------------------------------------------------


@contextlib.contextmanager
def heard(config: DeploymentConfig) -> Iterator[io.StringIO]:
    """What a process that is set up so writes to its stderr."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with contextlib.redirect_stderr(io.StringIO()) as written:
        logging_setup.set_up(config.logs, "test")
        try:
            yield written
        finally:
            root.handlers[:], root.level = before
            logging.captureWarnings(capture=False)


def a_line(**extra: Any) -> Observe:
    """How a line of level INFO is said."""

    async def observe(config: DeploymentConfig) -> str:
        with heard(config) as written:
            logging.getLogger("tests").info("sesame", extra=extra)
        if "sesame" not in written.getvalue():
            return "none"
        return "json" if written.getvalue().startswith("{") else "human"

    return observe


async def a_line_per_request(config: DeploymentConfig) -> bool:
    with heard(config) as written:
        await asked(config)
    return f"POST {CHAT_PATH} 200" in written.getvalue()


async def whether_it_traces(config: DeploymentConfig) -> bool:
    tracing.set_up(config.traces, "test")
    try:
        return tracing.is_on()
    finally:
        await asyncio.to_thread(tracing.shut_down)


async def size_of_a_traced_prompt(config: DeploymentConfig) -> str:
    """The size of the recorded prompt: none, whole, or cut to `max_content_bytes`."""
    with collecting() as collector:
        tracing.set_up(msgspec.structs.replace(config.traces, endpoint=collector.endpoint), "test")
        async with gateway(config) as world:
            long = {"role": "user", "content": "word " * 4000}
            await world.client.post(CHAT_PATH, json=CHAT | {"messages": [long]})
        await asyncio.to_thread(tracing.shut_down)
    sizes = [len(str(span.attributes.get("gen_ai.input.messages", ""))) for span in collector.spans]
    return {0: "none"}.get(max(sizes), f"{max(sizes) // 1000} kB")


async def whether_a_trace_is_recorded(config: DeploymentConfig) -> bool:
    tracing.set_up(config.traces, "test")
    try:
        traceparent = tracing.traceparent_of(tracing.start_server_span("POST", None, {}))
    finally:
        await asyncio.to_thread(tracing.shut_down)
    return traceparent is not None and bool(int(traceparent[-2:], 16) & 1)


# ---- which media it takes ----------------------------------------------------------------------------


def an_upload_of(size: int) -> Observe:
    """The status of an upload to `/v1/files`."""

    async def observe(config: DeploymentConfig) -> int:
        async with seeing(config.media) as world:
            files = {"file": ("a.png", png(comment=bytes(size)))}
            return (await world.client.post("/v1/files", files=files)).status_code

    return observe


def chat_with_files(count: int) -> Observe:
    """The status of a chat with so many images."""

    async def observe(config: DeploymentConfig) -> int:
        async with seeing(config.media) as world:
            body = chat(*[image(data_url(png()))] * count)
            return (await world.client.post(CHAT_PATH, json=body)).status_code

    return observe


async def loading_from(config: DeploymentConfig, url: str) -> str:
    async with seeing(config.media) as world:
        response = await world.client.post(CHAT_PATH, json=chat(image(url)))
    return str(response.json()["error"]["code"])


async def loading_media(config: DeploymentConfig) -> str:
    return await loading_from(config, "http://nowhere.invalid/cat.png")


async def a_host_that_says_nothing(config: DeploymentConfig) -> str:
    with socket.create_server(("127.0.0.1", 0)) as host:
        url = f"http://127.0.0.1:{host.getsockname()[1]}/cat.png"
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(loading_from(config, url))
            happened = await within(loading, config.media.fetch_timeout_s)
            loading.cancel()
        return loading.result() if happened else "is waited for"


@contextlib.contextmanager
def decoding(config: DeploymentConfig) -> Iterator[tuple[DecodingReader, Decoders, dict[str, Media]]]:
    """The reader of a worker, with an image and a video of 12 frames and 1.2 s."""
    files = {"image": samples.image("PNG"), "video": samples.video("mp4")}
    decoders = decoders_of(config.media)
    with contextlib.closing(decoders), tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        reader = DecodingReader(decoders, lambda medium: Path(folder) / medium.modality)
        yield reader, decoders, {name: Media(modality=name) for name in files}


def reads(modality: str, frames: int = 3) -> Observe:
    """The code of the error with which an image or some frames of a video are refused."""

    async def observe(config: DeploymentConfig) -> object:
        with decoding(config) as (reader, _, media):
            try:
                if modality == "image":
                    await asyncio.to_thread(reader.image, media["image"])
                else:
                    choose = lambda info: range(frames)  # noqa: E731
                    await asyncio.to_thread(reader.video, media["video"], choose=choose)
            except ClientError as error:
                return error.code
        return "read"

    return observe


async def a_decoder_that_hangs(config: DeploymentConfig) -> str:
    with decoding(config) as (reader, decoders, media):

        def hang(info: VideoInfo) -> range:
            os.kill(decoders.pids[0], signal.SIGSTOP)
            return range(info.frames)

        reading = asyncio.create_task(asyncio.to_thread(reader.video, media["video"], choose=hang))
        happened = await within(reading, config.media.decode_timeout_s)
        decoders.close()
        await asyncio.wait({reading})
        return getattr(reading.exception(), "code", "read") if happened else "is waited for"


async def number_of_decoders(config: DeploymentConfig) -> int:
    return decoders_of(config.media).count


def media(name: str) -> Observe:
    async def observe(config: DeploymentConfig) -> object:
        return getattr(config.media, name)

    return observe


# ---- the table ---------------------------------------------------------------------------------------

TWO_RANKS: Final = {"DALSEGNO_NODE_GROUPS": "[{node_names: [prepare, llm], ranks: [0, 1]}]"}
SMALL: Final = TWO_RANKS | {"DALSEGNO_DATA_PLANE_ARENA_BYTES": str(1 << 23)}
JOINED: Final = {"DALSEGNO_NATS_URL": "nats://127.0.0.1:4222"}
SEED: Final = nkeys.new_seed()
PUBLIC_KEY: Final = nkeys.public_key(SEED)
ENDPOINT: Final = {"DALSEGNO_TRACES_ENDPOINT": "http://127.0.0.1:1"}
BODY_TO_COME: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{"
)
TWO_MESSAGES: Final = [{"role": "user", "content": "What"}, {"role": "user", "content": "does len do?"}]


def written(text: str) -> Callable[[Path], str]:
    """A file that holds `text`."""

    def make(folder: Path) -> str:
        path = folder / "file"
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return make


TABLE: Final = [
    Row(key="model", said="other", observe=family_admitted, without="decoder_lm", with_="other"),
    Row(
        key="checkpoint",
        said=lambda _: str(tiny_checkpoint("llama")),
        observe=prompt_tokens_of_hello,
        without=17,
        with_=21,
    ),
    Row(key="max_seq_len", said="100", observe=tokens_granted, without=61, with_=97),
    Row(
        key="node_groups",
        said="[{node_names: [prepare, llm], ranks: [1]}]",
        observe=the_worker_that_is_started,
        without="worker-0",
        with_="worker-1",
    ),
    Row(
        key="name",
        said="other",
        observe=answer_to_a_request_for_tiny,
        without="NodeReady",
        with_="RequestRejected",
    ),
    Row(key="model_kwargs", said="{max_sequences: 3}", observe=rows_of_a_step, without=64, with_=3),
    Row(
        key="voices",
        said="[anna]",
        observe=voice_of_an_example,
        without="tara",
        with_="anna",
        also={
            "DALSEGNO_MODEL": "orpheus",
            "DALSEGNO_CHECKPOINT": str(tiny_orpheus()),
            "DALSEGNO_NODE_GROUPS": "[{node_names: [prepare, LLM, snac_decoder], ranks: [0]}]",
        },
    ),
    Row(
        key="adapters",
        said=lambda folder: (
            f"{{sql: {make_adapter(folder / 'sql', tiny_checkpoint('qwen3'), seed=1).folder}}}"
        ),
        observe=the_models_of_adapters,
        without=[],
        with_=["tiny:sql"],
    ),
    Row(
        key="adapters_at_runtime",
        said="true",
        observe=whether_adapters_are_loaded_at_run_time,
        without=False,
        with_=True,
    ),
    Row(
        key="adapters_memory_bytes",
        said="4096",
        observe=the_memory_of_adapters,
        without=1 << 30,
        with_=4096,
        also={"DALSEGNO_ADAPTERS_AT_RUNTIME": "true"},
    ),
    Row(key="kv_tokens", said="16", observe=tokens_granted, without=61, with_=13),
    Row(key="default_max_tokens", said="5", observe=tokens_granted, without=61, with_=5),
    Row(key="max_concurrent_requests", said="1", observe=how_many_are_admitted, without=2, with_=1),
    Row(
        key="max_attempts",
        said="1",
        observe=what_follows_a_workers_death,
        without="WalkBegun",
        with_="RequestFailed",
    ),
    Row(
        key="walk_timeouts_s",
        said="{prepare: 2.5}",
        observe=time_limits_of_a_step,
        without=[],
        with_=[2.5],
    ),
    Row(key="data_dir", said="data", observe=where_the_log_is_kept, without=False, with_=True),
    Row(
        key="devices",
        said="{0: cpu}",
        observe=the_device_of_rank_0,
        without="is not there",
        with_="cpu",
        also={"DALSEGNO_MODEL_KWARGS": "{device: 'cuda:99'}"},
    ),
    Row(
        key="scheduling.replicas",
        said="rr",
        observe=where_three_requests_run,
        without=[0, 0, 0],
        with_=[0, 1, 0],
        also=TWO_RANKS,
    ),
    Row(
        key="scheduling.max_in_flight_per_replica",
        said="1",
        observe=how_many_of_four_run,
        without=4,
        with_=2,
        also=TWO_RANKS,
    ),
    Row(
        key="scheduling.max_waiting",
        said="1",
        observe=how_many_of_four_are_turned_away,
        without=0,
        with_=2,
        also={"DALSEGNO_MAX_CONCURRENT_REQUESTS": "1"},
    ),
    Row(
        key="scheduling.shorten_above",
        said="0",
        observe=what_share_the_second_gets,
        without=1.0,
        with_=0.8,
    ),
    Row(
        key="scheduling.shorten_to",
        said="0.5",
        observe=what_share_the_second_gets,
        without=0.8,
        with_=0.5,
        also={"DALSEGNO_SCHEDULING_SHORTEN_ABOVE": "0"},
    ),
    Row(
        key="data_plane.arena_bytes",
        said=str(1 << 24),
        otherwise=str(1 << 23),
        observe=bytes_of_an_arena,
        without=1 << 23,
        with_=1 << 24,
    ),
    Row(
        key="data_plane.memory",
        said="named",
        observe=whether_an_arena_has_a_name,
        without=False,
        with_=True,
        also=SMALL,
    ),
    Row(
        key="data_plane.transports",
        said="local,tcp",
        otherwise="local,shm",
        observe=cards,
        without={"local", "shm"},
        with_={"local", "tcp"},
        also=SMALL,
    ),
    Row(
        key="data_plane.address",
        said="127.0.0.2",
        observe=the_address_of_rank_1,
        without="127.0.0.1",
        with_="127.0.0.2",
        also=SMALL,
    ),
    Row(
        key="data_plane.port",
        said=a_free_port,
        otherwise="0",
        observe=whether_rank_1_is_at_the_next_port,
        without=False,
        with_=True,
        also=SMALL,
    ),
    Row(
        key="gateway.host",
        said="127.0.0.2",
        observe=the_host_it_listens_on,
        without="127.0.0.1",
        with_="127.0.0.2",
        also={"DALSEGNO_GATEWAY_PORT": "0"},
    ),
    Row(
        key="gateway.port",
        said=a_free_port,
        otherwise="0",
        observe=whether_it_is_the_port,
        without=False,
        with_=True,
    ),
    Row(key="gateway.api_keys", said="web=sesame", observe=status_of(), without=200, with_=401),
    Row(key="gateway.api_keys_file", said=written("web=sesame"), observe=status_of(), without=200, with_=401),
    Row(
        key="gateway.cors_origins",
        said="https://a.example",
        observe=header("access-control-allow-origin"),
        without=None,
        with_="https://a.example",
    ),
    Row(
        key="gateway.allowed_hosts",
        said="models.example",
        observe=status_by_host("models.example"),
        without=403,
        with_=200,
    ),
    Row(
        key="gateway.model_aliases",
        said="gpt-5,other",
        observe=status_of(model="gpt-5"),
        without=404,
        with_=200,
    ),
    Row(
        key="gateway.security_headers",
        said="false",
        observe=header("x-content-type-options"),
        without="nosniff",
        with_=None,
    ),
    Row(
        key="gateway.requests_per_minute",
        said="1",
        observe=two_in_a_minute,
        without=[200, 200],
        with_=[200, 429],
    ),
    Row(key="gateway.max_in_flight", said="1", observe=one_beside_another, without=200, with_=429),
    Row(key="gateway.max_connections", said="1", observe=a_second_connection, without=200, with_=503),
    Row(
        key="gateway.max_body_bytes",
        said="1024",
        observe=status_of(messages=[{"role": "user", "content": "x" * 2000}]),
        without=200,
        with_=413,
    ),
    Row(key="gateway.max_tokens", said="4", observe=status_of(max_tokens=5), without=200, with_=400),
    Row(key="gateway.max_choices", said="1", observe=status_of(n=2), without=200, with_=400),
    Row(
        key="gateway.max_messages",
        said="1",
        observe=status_of(messages=TWO_MESSAGES),
        without=200,
        with_=400,
    ),
    Row(
        key="gateway.max_embeddings",
        said="1",
        observe=embeddings_status,
        without=200,
        with_=400,
    ),
    Row(
        key="gateway.max_documents",
        said="1",
        observe=rerank_status,
        without=200,
        with_=400,
    ),
    Row(
        key="gateway.request_timeout_s",
        said="0.05",
        observe=an_answer_that_does_not_come,
        without="is waited for",
        with_=504,
    ),
    Row(
        key="gateway.header_timeout_s",
        said="0.05",
        observe=after(HALF, "header_timeout_s"),
        without=0,
        with_=408,
    ),
    Row(
        key="gateway.body_timeout_s",
        said="0.05",
        observe=after(BODY_TO_COME, "body_timeout_s"),
        without=0,
        with_=408,
    ),
    Row(
        key="gateway.send_timeout_s",
        said="0.1",
        observe=a_client_that_takes_nothing,
        without="is borne with",
        with_="is cut off",
    ),
    Row(
        key="gateway.idle_timeout_s",
        said="0.05",
        observe=after(GET, "idle_timeout_s"),
        without=0,
        with_=200,
    ),
    Row(
        key="gateway.page",
        said="false",
        observe=what_a_browser_gets,
        without="text/html",
        with_="application/json",
    ),
    Row(key="gateway.batch_lines", said="3", observe=how_many_lines_run, without=32, with_=3),
    Row(
        key="gateway.drain_s",
        said="1.5",
        observe=how_long_answers_may_go_on,
        without=30.0,
        with_=1.5,
        also={"DALSEGNO_GATEWAY_PORT": "0"},
    ),
    Row(key="media.max_bytes", said="1024", observe=an_upload_of(2000), without=200, with_=413),
    Row(key="media.max_files", said="1", observe=chat_with_files(2), without=200, with_=400),
    Row(key="media.max_request_bytes", said="1024", observe=an_upload_of(2000), without=200, with_=413),
    Row(key="media.max_pixels", said="9", observe=reads("image"), without="read", with_="media_too_large"),
    Row(key="media.max_frames", said="2", observe=reads("video"), without="read", with_="media_too_large"),
    Row(key="media.max_seconds", said="0.5", observe=reads("video"), without="read", with_="media_too_large"),
    Row(
        key="media.allowed_hosts",
        said="[nowhere.invalid]",
        observe=loading_media,
        without="media_host_not_allowed",
        with_="media_not_loaded",
    ),
    Row(
        key="media.fetch_timeout_s",
        said="0.05",
        observe=a_host_that_says_nothing,
        without="is waited for",
        with_="media_not_loaded",
        also={"DALSEGNO_MEDIA_ALLOWED_HOSTS": "['127.0.0.1']"},
    ),
    Row(
        key="media.store_bytes",
        said="9000000",
        observe=how_the_log_is_kept("media_max_bytes"),
        without=None,
        with_=9000000,
    ),
    Row(
        key="media.cache_bytes", said="9000000", observe=media("cache_bytes"), without=1 << 32, with_=9000000
    ),
    Row(key="media.decoders", said="3", observe=number_of_decoders, without=2, with_=3),
    Row(
        key="media.decode_timeout_s",
        said="0.5",
        observe=a_decoder_that_hangs,
        without="is waited for",
        with_="media_too_large",
    ),
    Row(key="logs.level", said="error", observe=a_line(), without="human", with_="none"),
    Row(key="logs.format", said="json", observe=a_line(), without="human", with_="json"),
    Row(key="logs.prompts", said="true", observe=a_line(**PROMPT), without="none", with_="human"),
    Row(key="logs.requests", said="false", observe=a_line_per_request, without=True, with_=False),
    Row(
        key="traces.endpoint",
        said="http://127.0.0.1:1",
        observe=whether_it_traces,
        without=False,
        with_=True,
    ),
    Row(
        key="traces.sample_ratio",
        said="0",
        observe=whether_a_trace_is_recorded,
        without=True,
        with_=False,
        also=ENDPOINT,
    ),
    Row(
        key="traces.contents",
        said="true",
        observe=size_of_a_traced_prompt,
        without="none",
        with_="16 kB",
        also=ENDPOINT,
    ),
    Row(
        key="traces.max_content_bytes",
        said="5050",
        observe=size_of_a_traced_prompt,
        without="16 kB",
        with_="5 kB",
        also=ENDPOINT | {"DALSEGNO_TRACES_CONTENTS": "true"},
    ),
    Row(
        key="nats.url",
        said="nats://log.example",
        observe=the_server_that_is_joined,
        without="a private one",
        with_="nats://log.example:4222",
    ),
    Row(
        key="nats.prefix",
        said="other",
        observe=the_subject_of_a_request,
        without="ds.request.r1",
        with_="other.request.r1",
        also=JOINED,
    ),
    Row(
        key="nats.token",
        said="sesame",
        observe=the_token_that_is_shown,
        without=None,
        with_="sesame",
        also=JOINED,
    ),
    Row(
        key="nats.token_file",
        said=written("sesame\n"),
        observe=the_token_that_is_shown,
        without=None,
        with_="sesame",
        also=JOINED,
    ),
    Row(
        key="nats.user",
        said="ada",
        observe=the_password_that_is_shown,
        without=("somebody", "sesame"),
        with_=("ada", "sesame"),
        otherwise="somebody",
        also=JOINED | {"DALSEGNO_NATS_PASSWORD": "sesame"},
    ),
    Row(
        key="nats.password",
        said="simsim",
        observe=the_password_that_is_shown,
        without=("ada", "sesame"),
        with_=("ada", "simsim"),
        otherwise="sesame",
        also=JOINED | {"DALSEGNO_NATS_USER": "ada"},
    ),
    Row(
        key="nats.seed",
        said=SEED,
        observe=the_key_that_is_shown,
        without=None,
        with_=PUBLIC_KEY,
        also=JOINED,
    ),
    Row(
        key="nats.credentials_file",
        said=written(f"{SEED}\n"),
        observe=the_key_that_is_shown,
        without=None,
        with_=PUBLIC_KEY,
        also=JOINED,
    ),
    Row(
        key="nats.ca_file",
        said="/no-authority",
        observe=the_files_for_tls,
        without=None,
        with_=["no-authority"],
        also=JOINED,
    ),
    Row(
        key="nats.cert_file",
        said="/no-certificate",
        observe=the_files_for_tls,
        without=["no-other", "no-key"],
        with_=["no-certificate", "no-key"],
        otherwise="/no-other",
        also=JOINED | {"DALSEGNO_NATS_KEY_FILE": "/no-key"},
    ),
    Row(
        key="nats.key_file",
        said="/no-key",
        observe=the_files_for_tls,
        without=["no-certificate", "no-other"],
        with_=["no-certificate", "no-key"],
        otherwise="/no-other",
        also=JOINED | {"DALSEGNO_NATS_CERT_FILE": "/no-certificate"},
    ),
    Row(
        key="nats.durability",
        said="cluster",
        observe=how_the_log_is_kept("durability"),
        without="process",
        with_="cluster",
        also=JOINED,
    ),
    Row(
        key="nats.monitors",
        said="http://one:8222,https://two:8222",
        observe=how_the_log_is_kept("monitors"),
        without=[],
        with_=["http://one:8222", "https://two:8222"],
    ),
    Row(
        key="nats.max_bytes",
        said="1048576",
        observe=how_the_log_is_kept("max_bytes"),
        without=None,
        with_=1 << 20,
    ),
    Row(
        key="nats.max_age_s",
        said="3600",
        observe=how_the_log_is_kept("max_age_s"),
        without=7 * 24 * 3600.0,
        with_=3600.0,
    ),
    Row(
        key="nats.max_consumers",
        said="300",
        observe=how_the_log_is_kept("max_consumers"),
        without=2048,
        with_=300,
    ),
    Row(
        key="nats.max_consumers_per_key",
        said="20",
        observe=readers_per_key,
        without=128,
        with_=20,
    ),
    Row(
        key="recovery.worker_silent_s",
        said="0.6",
        otherwise="600",
        observe=whether_a_silent_worker_is_given_up,
        without=False,
        with_=True,
    ),
    Row(
        key="recovery.worker_hung_s",
        said="0.5",
        otherwise="0",
        observe=whether_a_hung_worker_is,
        without=False,
        with_=True,
    ),
    Row(
        key="recovery.leader_silent_s",
        said="0.6",
        otherwise="600",
        observe=whether_a_silent_leader_is_followed_by_another,
        without=False,
        with_=True,
    ),
    Row(
        key="recovery.conductors",
        said="2",
        observe=the_conductors_that_are_started,
        without=["conductor"],
        with_=["conductor", "conductor-2"],
    ),
    Row(
        key="recovery.gateways",
        said="2",
        observe=the_gateways_that_are_started,
        without=["gateway"],
        with_=["gateway", "gateway-2"],
    ),
    Row(
        key="recovery.snapshot_every",
        said="1",
        observe=whether_a_snapshot_is_written_soon,
        without=False,
        with_=True,
    ),
    Row(
        key="recovery.templates",
        said="false",
        observe=the_roles_with_a_template,
        without=["conductor", "gateway", "worker"],
        with_=[],
    ),
    Row(
        key="sealing.enabled",
        said="false",
        observe=whether_the_log_is_sealed,
        without=True,
        with_=False,
    ),
    Row(
        key="sealing.key_file",
        said=lambda folder: str(folder / "mine.key"),
        observe=the_name_of_the_key_file,
        without="seal.key",
        with_="mine.key",
    ),
    Row(
        key="sealing.key",
        said="11" * 32,
        observe=whether_the_key_is_the_given_one,
        without=False,
        with_=True,
    ),
    Row(
        key="sealing.trusted_keys",
        said="22" * 32,
        observe=whether_another_key_is_trusted,
        without=False,
        with_=True,
    ),
    Row(
        key="sealing.interval_s",
        said="0.2",
        otherwise="3600",
        observe=whether_seals_come_at_intervals,
        without=False,
        with_=True,
    ),
    Row(
        key="sealing.anchor_dir",
        said=lambda folder: str(folder / "elsewhere"),
        observe=the_folder_of_the_anchors,
        without="anchors",
        with_="elsewhere",
    ),
    Row(
        key="sealing.anchors",
        said="https://anchors.example/dalsegno",
        observe=the_places_of_anchors,
        without=[],
        with_=["https://anchors.example/dalsegno"],
    ),
]


def test_every_key_is_in_the_table_once() -> None:
    assert [row.key for row in TABLE] == list(KEYS)


@pytest.mark.processes
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.key)
async def test_every_key_changes_something(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "other", "models.decoder_lm")
    said = row.said if isinstance(row.said, str) else row.said(tmp_path)
    variable = KEYS[row.key].variable

    without = await row.observe(configured({**row.also, variable: row.otherwise}))
    with_ = await row.observe(configured({**row.also, variable: said}))

    assert (without, with_) == (row.without, row.with_)
    assert row.without != row.with_
