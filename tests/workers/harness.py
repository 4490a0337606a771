"""A worker's surroundings, pretended: a log in memory, an engine driven by hand, a conductor's orders.

The toy family has three kinds of walk: CPU nodes (a nested loop, a Parallel), and `prefill` and `decode`
over a KV node, as a language model has them. Its tokens are bytes: token 65 is `A`.
"""

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from models.base import CpuResult, EngineKind, ModelGraph, TextDecoder
from shared.errors import ClientError
from shared.events import (
    AnyEvent,
    Event,
    NodeReady,
    OutputChunk,
    OutputFence,
    Usage,
    WalkCall,
    WalkCompleted,
    WalkStop,
    decode,
    encode,
)
from shared.ids import Incarnation, Rank
from shared.log.memory import MemoryLog, MemoryStore
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.subjects import Subjects
from shared.tensors import Handle, inline_ids, read_ids
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, Parallel, Sequential, compile_walk
from tests.admissions import admitted
from workers.data_plane.port import Array
from workers.data_plane.store import open_store
from workers.execution.executor import OrderExecutor
from workers.execution.node_executor import HostedModel
from workers.generation.engine_client import EngineClient
from workers.kv_engine.outputs import EmissionOutput, Output, PromptOutput, TokenOutput, TokenScore
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.sequence_spec import FinishReason, SequenceSpec
from workers.machine.cpu_pool import CpuPool
from workers.membership.event_writer import EventWriter
from workers.membership.heartbeat import Heartbeat
from workers.orders.inbox import StartOrder, StepKey, StopOrder

SUBJECTS: Final = Subjects()
RANK: Final = Rank(0)
LIFE: Final = Incarnation(7)
EOS: Final = 0
EMISSION: Final = 4
"""The tokens that a pretended token program emits together."""
E = TypeVar("E", bound=Event)

GREET: Final = Node(
    "greet", inputs=("name",), outputs=(Edge("greeting", to=CLIENT("text")), Edge("greeting", to=KEEP))
)
TRAP: Final = Node("trap", inputs=("name",), outputs=(Edge("nothing", to=KEEP),))
COUNT: Final = Loop(
    "outer",
    Sequential(
        Loop(
            "inner",
            Node("add", inputs=("sum",), outputs=(Edge("sum", to="add"), Edge("sum", to="show"))),
            max_iters=3,
            outputs=("sum",),
        ),
        Node("show", inputs=("sum",), outputs=(Edge("shown", to=KEEP), Edge("sum_again", to="merge"))),
        Parallel(
            Node("merge", inputs=("sum_again",), outputs=(Edge("left", to="join"), Edge("side", to="twin"))),
            Node("twin", inputs=("side",), outputs=(Edge("right", to="join"),)),
        ),
        Node("join", inputs=("left", "right"), outputs=(Edge("joined", to=KEEP),)),
    ),
    max_iters="rounds",
    outputs=("joined",),
    accumulated=("shown",),
)
PREFILL: Final = Node(
    "llm", inputs=("token_ids",), outputs=(Edge("token", to=KEEP), Edge("token", to=CLIENT("text")))
)
DECODE: Final = Loop(
    "decode",
    Node("llm", inputs=("token",), outputs=(Edge("token", to="llm"), Edge("token", to=CLIENT("text")))),
    max_iters="max_tokens",
)
SCORE: Final = Node("llm", inputs=("token_ids",), outputs=())
SECRET: Final = Node("llm", inputs=("token_ids",), outputs=(Edge("token", to=KEEP),))


def _plan(request: PlanRequest) -> Plan:
    yield Walk("greet")
    return Finish(usage=Usage(), finish_reasons=())


class OneTrack(ModelGraph):
    """A model whose nodes speak one after the other, in steps of their own, and into one track."""

    @property
    def tracks(self) -> dict[str, str]:
        return dict.fromkeys(super().tracks, "")


TOY: Final = OneTrack(
    family="toy",
    nodes={
        **dict.fromkeys(("greet", "trap", "add", "show", "merge", "twin", "join"), EngineKind.CPU),
        "llm": EngineKind.KV,
        "painter": EngineKind.STATELESS,
    },
    walks={
        "greet": compile_walk("greet", GREET),
        "trap": compile_walk("trap", TRAP),
        "count": compile_walk("count", COUNT),
        "prefill": compile_walk("prefill", PREFILL),
        "decode": compile_walk("decode", DECODE),
        "secret": compile_walk("secret", SECRET),
        "score": compile_walk("score", SCORE),
        "paint": compile_walk("paint", Node("painter", inputs=(), outputs=(Edge("x", to=KEEP),))),
    },
    plan=_plan,
)


def text(value: str, key: str = "t") -> Handle:
    """A tensor of text."""
    raw = value.encode()
    return Handle(key=key, dtype="uint8", shape=(len(raw),), data=raw)


class ToyProcessing:
    """The toy's CPU face. `gate` holds the node `greet` back until it is set."""

    eos_ids = (EOS,)
    tool_calls = ""

    def __init__(self) -> None:
        self.greets_as = "hello"
        self.calls: list[tuple[str, str]] = []

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        self.calls.append((node, key))
        values = {name: handle.data for name, handle in inputs.items()}
        match node:
            case "greet":
                greeting = f"{self.greets_as} {(values['name'] or b'').decode()}"
                return CpuResult(
                    facts={"length": len(greeting)}, outputs={"greeting": text(greeting, f"{key}/greeting")}
                )
            case "trap":
                error = args["error"]
                raise error if isinstance(error, Exception) else ClientError(error, code="trapped")
            case "add":
                [total] = read_ids(inputs["sum"])
                return CpuResult(outputs={"sum": inline_ids(f"{key}/sum", [total + 1])})
            case "show":
                return CpuResult(outputs={"shown": inputs["sum"], "sum_again": inputs["sum"]})
            case "merge":
                return CpuResult(outputs={"left": inputs["sum_again"], "side": inputs["sum_again"]})
            case "twin":
                return CpuResult(outputs={"right": inputs["side"]})
            case "join":
                [left], [right] = read_ids(inputs["left"]), read_ids(inputs["right"])
                return CpuResult(facts={"last": left}, outputs={"joined": inline_ids(key, [left + right])})
            case _:
                raise AssertionError(node)

    def text_decoder(self) -> TextDecoder:
        return ByteDecoder()


class ByteDecoder:
    """A token is a byte. Token 255 is one it stumbles over."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id == 255:
            raise ZeroDivisionError("a decoder's bug")
        return self._utf8.decode(bytes([token_id]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id])


@dataclass(slots=True)
class FakeEngine:
    """An engine of which every step is made by the test.

    Attributes:
        says: what each sequence generates, by request; the rest of it follows a prefix.
        steps: how many steps were made.
        held: sequences that take part in none.
        scored: how many of each prompt's tokens are scored; so many more are in each step.
    """

    rows: EngineClient
    says: dict[str, Sequence[int]] = field(default_factory=dict)
    specs: dict[str, SequenceSpec] = field(default_factory=dict)
    submitted: list[SequenceSpec] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    refuses: Exception | None = None
    steps: int = 0
    scored: dict[str, int] = field(default_factory=dict)
    scores_per_step: int = 1000
    held: set[str] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, spec: SequenceSpec | ProgramSpec | RunInputs) -> None:
        assert isinstance(spec, SequenceSpec), "programs need a real engine"
        if self.refuses is not None:
            raise self.refuses
        self.specs[spec.key] = spec
        self.submitted.append(spec)
        self._changed.set()

    def hold(self, key: str) -> None:
        self.held.add(key)
        self._changed.set()

    def resume(self, key: str) -> None:
        self.held.discard(key)
        self._changed.set()

    def feed(self, key: str, items: Array | None, *, ended: bool) -> None:
        raise AssertionError("only a real engine is fed")

    def cancel(self, key: str) -> None:
        """As the engine's thread: one more step may be under way."""
        self.cancelled.append(key)
        self.specs.pop(key, None)
        asyncio.get_running_loop().call_soon(self.rows.on_cancelled, key, 1)
        self._changed.set()

    async def until(self, condition: Callable[["FakeEngine"], bool]) -> None:
        """Wait for something submitted or cancelled."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    async def has(self, count: int = 1) -> None:
        await self.until(lambda engine: len(engine.specs) >= count)

    def step(self) -> None:
        """One token for every sequence, or some of its prompt's scores."""
        self.steps += 1
        outputs: list[Output] = [
            self._score(spec) if self._is_unscored(spec) else self._said(spec)
            for spec in self.specs.values()
            if spec.key not in self.held
        ]
        for output in outputs:
            if output.finish is not None:
                del self.specs[output.key]
        self.rows.on_outputs(outputs)

    def run_out(self) -> None:
        """Step until nothing is left."""
        while self.specs:
            self.step()

    def _said(self, spec: SequenceSpec) -> Output:
        return self._emission(spec) if spec.token_program else self._next(spec)

    def _emission(self, spec: SequenceSpec) -> EmissionOutput:
        """Some tokens together; a program that says nothing more has ended the answer."""
        says, first = self.says[spec.key.split(".")[0]], len(spec.prefix_ids)
        finish = None
        for token in says[first : first + EMISSION]:
            spec.prefix_ids.append(token)
            if (finish := spec.finish_reason(token, len(spec.prefix_ids))) is not None:
                break
        if finish is None and len(spec.prefix_ids) == len(says):
            finish = FinishReason.LENGTH
        return EmissionOutput(
            key=spec.key,
            token_ids=tuple(spec.prefix_ids[first:]),
            index=first,
            finish=finish,
            step=self.steps,
            counts={"forwards": 1},
        )

    def _next(self, spec: SequenceSpec) -> TokenOutput:
        token = self.says[spec.key.split(".")[0]][len(spec.prefix_ids)]
        spec.prefix_ids.append(token)  # counts what was generated
        finish = spec.finish_reason(token, len(spec.prefix_ids))
        score = told_of(token, spec.logprobs) if spec.logprobs is not None else None
        index = len(spec.prefix_ids) - 1
        return TokenOutput(
            key=spec.key, token_id=token, index=index, finish=finish, step=self.steps, score=score
        )

    def _is_unscored(self, spec: SequenceSpec) -> bool:
        return spec.scores_prompt and self.scored.get(spec.key, 1) < len(spec.prompt_ids)

    def _score(self, spec: SequenceSpec) -> PromptOutput:
        begin = self.scored.get(spec.key, 1)
        tokens = spec.prompt_ids[begin : begin + self.scores_per_step]
        self.scored[spec.key] = begin + len(tokens)
        is_last = spec.max_tokens == 0 and not self._is_unscored(spec)
        return PromptOutput(
            key=spec.key,
            scores=tuple(told_of(token, spec.logprobs or 0) for token in tokens),
            finish=FinishReason.LENGTH if is_last else None,
            step=self.steps,
        )


def told_of(token: int, top: int) -> TokenScore:
    """What the pretended model thinks of a token."""
    return TokenScore(token_id=token, logprob=-token / 8, top=tuple((token + n, -n / 8) for n in range(top)))


def ready(request_id: str, *walks: WalkCall, attempt: int = 1, step: int = 0, seed: int = 0) -> NodeReady:
    return NodeReady(
        id=f"{request_id}.ready.{attempt}.{step}.0",
        writer="conductor",
        request_id=request_id,
        attempt=attempt,
        index=step,
        incarnation=LIFE,
        epoch=1,
        trace="00-trace",
        rank=RANK,
        model="toy",
        walks=list(walks),
        placement=dict.fromkeys(TOY.nodes, RANK),
        origin="g-1",
        seed=seed,
        reason="",
        history=b"",
    )


def chat(prompt: Sequence[int] = (1, 2), *, max_tokens: int = 100, **args: Any) -> tuple[WalkCall, WalkCall]:
    """The two walks of an answer."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    args = {"max_tokens": max_tokens, "sampling": sampling, "stop": [], "ignore_eos": False} | args
    prefill = WalkCall(name="prefill", inputs={"token_ids": inline_ids("p", list(prompt))}, args=args)
    return prefill, WalkCall(name="decode", args=args)


def start(order: NodeReady) -> StartOrder:
    return StartOrder(StepKey(str(order.request_id), order.attempt, order.index), order)


def stop(order: NodeReady, *, started: bool = True) -> StopOrder:
    event = WalkStop(
        id=f"{order.request_id}.stop",
        writer="conductor",
        request_id=order.request_id,
        attempt=order.attempt,
        index=order.index,
        incarnation=order.incarnation,
        epoch=1,
        rank=order.rank,
        reason="cancelled",
        history=b"",
    )
    return StopOrder(StepKey(str(order.request_id), order.attempt, order.index), event, started=started)


def fence(request_id: str, attempt: int, epoch: int = 1) -> OutputFence:
    return OutputFence(
        id=f"{request_id}.fence.{attempt}",
        writer="conductor",
        request_id=request_id,
        attempt=attempt,
        epoch=epoch,
        reason="",
        history=b"",
    )


def admit(server: MemoryStore, request_id: str = "r") -> None:
    """Admit a request, unless it is: without, what earlier attempts wrote is not its output."""
    subject = SUBJECTS.walk(request_id)
    if not any(record.subject == subject for record in server.records):
        server.append(subject, encode(admitted(request_id)))


@dataclass(slots=True)
class Rig:
    """An executor and all around it."""

    server: MemoryStore
    log: MemoryLog
    engine: FakeEngine
    processing: ToyProcessing
    executor: OrderExecutor

    def start(self, order: NodeReady) -> None:
        self.executor.start(start(order))

    def order(self, order: NodeReady) -> None:
        """Start an order that is in the log."""
        self.executor.start(start(order), self.put_order(order))

    def put_order(self, order: NodeReady) -> int:
        """Put an order into the log; where it is."""
        return self.server.append(SUBJECTS.ready(order.rank, str(order.request_id)), encode(order)).seq

    def put_done(self, order: NodeReady, done: WalkCompleted) -> None:
        """Put into the log that an order was carried out, by an earlier life."""
        admit(self.server, str(order.request_id))
        about = {"request_id": order.request_id, "attempt": order.attempt, "index": order.index}
        event = msgspec.structs.replace(done, id=f"done.{order.id}", **about)
        self.server.append(SUBJECTS.done(order.rank, str(order.request_id)), encode(event))

    async def event(
        self, kind: type[E], request_id: str = "r", attempt: int = 1, index: int | None = None
    ) -> E:
        """The first such event of a request and attempt, once it is stored."""
        async with aclosing(self.log.read(SUBJECTS.all_of(request_id), 1)) as records:
            async for record in records:
                found = decode(record.data)
                if isinstance(found, kind) and found.attempt == attempt and index in (None, found.index):
                    return found
        raise AssertionError

    def events(self, kind: type[E]) -> list[E]:
        """All such events stored so far."""
        return [event for event in self.all() if isinstance(event, kind)]

    def all(self) -> list[AnyEvent]:
        return [decode(record.data) for record in self.server.records]

    def put_fence(self, event: OutputFence) -> None:
        admit(self.server, str(event.request_id))
        subject = SUBJECTS.output("g-1", str(event.request_id), "conductor")
        self.server.append(subject, encode(event))

    def released(self, request_id: str = "r") -> str:
        return "".join(c.text for c in self.events(OutputChunk) if c.request_id == request_id)


@asynccontextmanager
async def rigged(
    server: MemoryStore | None = None, *, max_posted: int = 1000, puts: int = 0
) -> AsyncIterator[Rig]:
    """A rig; what runs at the end is dropped. `puts` tensors are expected in the store."""
    server = server or MemoryStore(SUBJECTS)
    log = MemoryLog(server, max_posted=max_posted)
    rows = EngineClient()
    engine = FakeEngine(rows)
    rows.engine = engine
    processing = ToyProcessing()
    store = open_store(total_bytes=1 << 20)
    store.begin_incarnation(RANK, LIFE)
    writer = EventWriter(log, RANK)
    writer.incarnation = LIFE
    with CpuPool(2) as pool:
        hosted = HostedModel(graph=TOY, processing=processing, engine=rows, pool=pool, store=store)
        try:
            async with asyncio.TaskGroup() as tasks:
                executor = OrderExecutor(hosted, log=log, subjects=SUBJECTS, writer=writer, tasks=tasks)
                yield Rig(server, log, engine, processing, executor)
                await executor.abandon()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # a failed test says what failed, and no more
        finally:
            await log.close()
            assert store.stats().puts == puts, "steps of one rank put only kept arrays into the store"
            await store.close()


@dataclass(slots=True)
class FakeHeartbeatConnection:
    """A heartbeat connection to a log in memory, usable from any thread."""

    server: MemoryStore
    loop: asyncio.AbstractEventLoop

    async def send_heartbeat(self, subject: str, data: bytes) -> None:
        self.loop.call_soon_threadsafe(self.server.broadcast, subject, data)

    async def close(self) -> None:
        pass


def heartbeat(server: MemoryStore, every_s: float = 0.01) -> Heartbeat:
    """A rank's heartbeats on a log in memory."""
    loop = asyncio.get_running_loop()

    async def open_heartbeat_connection() -> FakeHeartbeatConnection:
        return FakeHeartbeatConnection(server, loop)

    return Heartbeat(SUBJECTS.heartbeat("worker", str(RANK)), open_heartbeat_connection, every_s=every_s)


async def turns(count: int = 20) -> None:
    """Let the loop go round: whatever can happen without anybody's doing has happened."""
    for _ in range(count):
        await asyncio.sleep(0)
