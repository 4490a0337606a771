from collections.abc import Sequence
from typing import Any

import pytest

from models.base import EngineKind, ModelGraph
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import (
    CLIENT,
    Edge,
    Fixed,
    Loop,
    Node,
    StreamingEdge,
    StreamInput,
    WalkError,
    compile_walk,
)
from shared.walks.chunks import AfterEnd, ChunkPolicy
from shared.walks.language import Section


def _plan(request: PlanRequest) -> Plan:
    yield Walk("act")
    return Finish(usage=Usage(), finish_reasons=())


def graph(edge: str, modality: str, kind: EngineKind = EngineKind.KV) -> ModelGraph:
    walk = compile_walk("act", Node("policy", ["token_ids"], [Edge(edge, CLIENT(modality))]))
    return ModelGraph(family="robot", nodes={"policy": kind}, walks={"act": walk}, plan=_plan)


def test_the_tokens_of_a_kv_node_reach_the_client_as_text_only() -> None:
    with pytest.raises(WalkError) as refused:
        graph("token", "actions")
    assert str(refused.value) == (
        "walk 'act': edge 'token' of KV node 'policy' goes to CLIENT(\"actions\"), but tokens reach the "
        'client as text only: send them to CLIENT("text"), or to a CPU or stateless node that makes '
        "something else of them"
    )


def test_text_and_other_values_may_go_to_the_client() -> None:
    assert graph("token", "text").outputs == ("text",)
    assert graph("actions", "actions").outputs == ("actions",)
    assert graph("token", "actions", EngineKind.STATELESS).outputs == ("actions",)


# ---- KV nodes that take streams ------------------------------------------------------------------


def talking(
    *,
    chunks: ChunkPolicy = Fixed(1),  # noqa: B008 - it is frozen
    after_end: AfterEnd = "empty",
    streams: Sequence[str] = ("states",),
    outputs: Sequence[Edge] = (),
    in_loop: bool = True,
) -> ModelGraph:
    """A talker that takes streams of a thinker."""
    sent = [StreamingEdge(name, "talker", chunks=chunks, after_end=after_end) for name in streams]
    talker = Node("talker", ["token_ids", *map(StreamInput, streams)], outputs)
    walks = {
        "think": Node("thinker", ["token_ids"], sent),
        "talk": Loop("talk", talker, "max_tokens") if in_loop else talker,
    }
    return ModelGraph(
        family="omni",
        nodes=dict.fromkeys(("thinker", "talker"), EngineKind.KV),
        walks={name: compile_walk(name, section) for name, section in walks.items()},
        plan=_plan,
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"streams": ("states", "marks")}, "takes 2 streams: expected one"),
        (
            {"chunks": Fixed(2)},
            r"in chunks of Fixed\(count=2\), after_end='empty': expected an item for each",
        ),
        (
            {"after_end": "stop"},
            r"after_end='stop': expected an item for each of its tokens, chunks=Fixed\(1\)",
        ),
        ({"in_loop": False}, "outside of a loop of its own"),
        ({"outputs": [Edge("token", CLIENT("text"))]}, "takes a stream and sends tokens to the client"),
    ],
)
def test_a_kv_node_takes_one_stream_an_item_per_token(how: dict[str, Any], message: str) -> None:
    assert [to for _, to in talking().streams] == ["talker"]
    with pytest.raises(WalkError, match=f"walk 'talk': KV node 'talker' .*{message}"):
        talking(**how)


def test_a_range_is_for_tokens_alone() -> None:
    edge = StreamingEdge("states", "sink", chunks=Fixed(1), only=(1, 5))
    walks: dict[str, Section] = {
        "think": Node("thinker", ["token_ids"], [edge]),
        "sink": Loop("sink", Node("sink", [StreamInput("states")]), None),
    }
    with pytest.raises(WalkError, match=r"'thinker' streams tensors 'states' to 'sink' with only=\(1, 5\)"):
        ModelGraph(
            family="omni",
            nodes={"thinker": EngineKind.KV, "sink": EngineKind.STATELESS},
            walks={name: compile_walk(name, section) for name, section in walks.items()},
            plan=_plan,
        )
