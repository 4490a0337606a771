"""A model on many ranks, for tests: it says six tokens, and others make sounds and captions of them.

    prepare                                a CPU node
    prefill, decode     talker             the tokens; may be on two ranks
    go_on               talker             with a partition beside it: the second half of them
    render, master      vocoder            takes the stream `codes`, two items at a time
    caption, sign       captioner          takes the stream `words`, three at a time

A request's text says how many partitions it has: `solo`, `duet` (and a voice) or `trio` (and captions).
"""

from typing import Any, Final

import msgspec

from conductor.core.schedule import Deployment
from configs.placement import PlacedGroup, rank_of
from models import registry
from models.base import EngineKind, ModelGraph
from shared.events import NodeReady, Usage, WalkCompleted, WalkResult
from shared.ids import Rank
from shared.plans import Chain, Finish, Join, Plan, PlanRequest, Start, SubPlan, Walk
from shared.tensors import Handle
from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Fixed,
    Loop,
    Node,
    Section,
    StreamingEdge,
    StreamInput,
    compile_walk,
)
from tests.conductor.script import LIMITS

TOKENS: Final = 6
CODES: Final = StreamingEdge("codes", "vocoder", chunks=Fixed(2))
WORDS: Final = StreamingEdge("words", "captioner", chunks=Fixed(3))

PREPARE: Final = Node("prepare", (), (Edge("ids", KEEP),))
PREFILL: Final = Node("talker", ("ids",), (Edge("token", KEEP),))
_TALK: Final = (
    Edge("token", "talker"),
    Edge("token", CLIENT("text")),
    Edge("state", KEEP),
    CODES,
    WORDS,
)
DECODE: Final = Loop("decode", Node("talker", ("token",), _TALK), max_iters="max_tokens", outputs=("state",))
GO_ON: Final = Loop(
    "go_on", Node("talker", ("state", "token"), _TALK), max_iters="max_tokens", outputs=("state",)
)
RENDER: Final = Loop(
    "render",
    Node("vocoder", (StreamInput("codes"),), (Edge("audio", CLIENT("audio")), Edge("sound", KEEP))),
    max_iters=None,
    outputs=("sound",),
)
MASTER: Final = Node("vocoder", ("sound",), (Edge("mastered", KEEP),))
CAPTION: Final = Loop(
    "caption",
    Node("captioner", (StreamInput("words"),), (Edge("caption", CLIENT("text")),)),
    max_iters=None,
)
SIGN: Final = Node("captioner", ("state",))


def plan(request: PlanRequest) -> Plan:
    """Prepare, then talk while the other partitions listen, then sign."""
    kind = request.inputs.text
    prepared = yield Walk("prepare", args={"text": kind})
    ends: tuple[str, ...] = ()
    if kind in {"duet", "trio"}:
        yield Start("voice", voice())
        ends = ("codes",)
    if kind == "trio":
        yield Start("captions", captions())
        ends = ("codes", "words")
    half = TOKENS // 2 if ends else TOKENS
    told = yield Chain(
        Walk("prefill", inputs={"ids": prepared.handle("ids")}),
        Walk("decode", args={"first": 0, "max_tokens": half}),
    )
    if ends:
        args = {"first": half, "max_tokens": TOKENS - half}
        told = yield Walk("go_on", inputs={"state": told.handle("state")}, args=args, ends=ends)
    if kind == "trio":
        yield Join("captions")
    if kind in {"duet", "trio"}:
        yield Join("voice")
    yield Walk("sign", inputs={"state": told.handle("state")})
    usage = Usage(
        prompt_tokens=prepared.fact("prompt_tokens"), completion_tokens=told.fact("completion_tokens")
    )
    return Finish(usage=usage, finish_reasons=("length",))


def voice() -> SubPlan:
    """Two steps: the second has a tensor of the first."""
    rendered = yield Walk("render")
    mastered = yield Walk("master", inputs={"sound": rendered.handle("sound")})
    return mastered.fact("seconds")


def captions() -> SubPlan:
    """One step, that comes to nothing but its output."""
    yield Walk("caption")


WALKS: Final[dict[str, Section]] = {
    "prepare": PREPARE,
    "prefill": PREFILL,
    "decode": DECODE,
    "go_on": GO_ON,
    "render": RENDER,
    "master": MASTER,
    "caption": CAPTION,
    "sign": SIGN,
}
GRAPH: Final = ModelGraph(
    family="speech",
    nodes={
        "prepare": EngineKind.CPU,
        "talker": EngineKind.KV,
        "vocoder": EngineKind.STATELESS,
        "captioner": EngineKind.STATELESS,
    },
    walks={name: compile_walk(name, section) for name, section in WALKS.items()},
    plan=plan,
    modalities=("text", "audio"),
)


def graph_of(family: str) -> ModelGraph:
    """This graph among the others."""
    return GRAPH if family == "speech" else registry.graph(family)


def group(nodes: str, *ranks: int, walks: str | None = None) -> PlacedGroup:
    """`group("talker vocoder", 1, 2)`: names apart by spaces."""
    return PlacedGroup(
        nodes=tuple(nodes.split()),
        walks=tuple(walks.split()) if walks else None,
        ranks=tuple(Rank(rank) for rank in ranks),
    )


LAYOUTS: Final[dict[str, tuple[PlacedGroup, ...]]] = {
    "one": (group("prepare talker vocoder captioner", 0),),
    "two": (group("prepare talker", 0), group("vocoder captioner", 1)),
    "three": (
        group("prepare captioner", 0),
        group("talker", 0, walks="prefill"),
        group("talker", 1, walks="decode go_on"),
        group("vocoder", 2),
    ),
    "replicas": (
        group("prepare", 0),
        group("talker", 0, 1, walks="prefill"),
        group("talker", 1, 2),
        group("vocoder captioner", 0, 2),
    ),
}


def deployment(layout: str | tuple[PlacedGroup, ...] = "three", **changes: Any) -> Deployment:
    """The model under one of the layouts."""
    base = Deployment(
        model="demo",
        family="speech",
        groups=LAYOUTS[layout] if isinstance(layout, str) else layout,
        kv_nodes=frozenset({"talker"}),
        limits=LIMITS,
        max_concurrent_requests=8,
        graph_digest="g",
        plan_digest="p",
        config_digest="c",
        core_digest="k",
    )
    return msgspec.structs.replace(base, **changes)


_FACTS: Final[dict[str, dict[str, Any]]] = {
    "prepare": {"prompt_tokens": 3},
    "prefill": {"cached": 0},
    "decode": {"completion_tokens": TOKENS},
    "go_on": {"completion_tokens": TOKENS},
    "master": {"seconds": 2},
}
_OUTPUTS: Final = {
    "prepare": ("ids",),
    "decode": ("state",),
    "go_on": ("state",),
    "render": ("sound",),
    "master": ("mastered",),
}


def key_of(ready: NodeReady, walk: str, node: str, edge: str) -> str:
    """The name of what a step puts out."""
    return f"{ready.request_id}/{ready.attempt}/{ready.index}/{walk}/{node}/{edge}"


def handle_of(ready: NodeReady, walk: str, node: str, edge: str) -> Handle:
    """A tensor in the arena of the life that an order is for."""
    return Handle(
        key=key_of(ready, walk, node, edge),
        dtype="int32",
        shape=(3,),
        rank=ready.rank,
        incarnation=ready.incarnation,
    )


def part(ready: NodeReady, **changes: Any) -> WalkCompleted:
    """What a healthy rank reports when it has done its part of `ready`."""
    results = []
    for walk in ready.walks:
        (node,) = GRAPH.walks[walk.name].nodes
        if rank_of(ready.placement, ready.walk_placement, walk.name, node) != ready.rank:
            results.append(WalkResult(name=walk.name))
            continue
        outputs = {edge: handle_of(ready, walk.name, node, edge) for edge in _OUTPUTS.get(walk.name, ())}
        results.append(WalkResult(name=walk.name, facts=_FACTS.get(walk.name, {}), outputs=outputs))
    event = WalkCompleted(
        id=f"{ready.id}.done",
        writer=f"w{ready.rank}",
        request_id=ready.request_id,
        attempt=ready.attempt,
        incarnation=ready.incarnation,
        index=ready.index,
        rank=ready.rank,
        results=results,
    )
    return msgspec.structs.replace(event, **changes)
