import pytest

from models.base import EngineKind, ModelGraph
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, Edge, Node, WalkError, compile_walk


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
