from typing import Any

import msgspec
import pytest

from models import registry
from models.base import ModelGraph
from shared.errors import BugError
from shared.events import NodeReady, WalkCall
from tests.workers import harness, mesh
from workers.execution.step_placement import GraphOutputs, StepPlacement

ORPHEUS = registry.graph("orpheus")
LIVES = {0: 1, 1: 2, 2: 3}


def placed(graph: ModelGraph, rank: int, *names: str, ends: tuple[str, ...] = (), **where: Any) -> StepPlacement:
    calls = [WalkCall(name=name, args=where.pop("args", {})) for name in names]
    order: NodeReady = msgspec.structs.replace(
        harness.ready("r", *calls),
        rank=rank,
        lives=LIVES,
        ends=list(ends),
        placement={"prepare": 0, "LLM": 1, "snac_decoder": 2, "llm": 1},
        walk_placement={"prefill": {"LLM": 0, "llm": 0}},
    )
    return StepPlacement(GraphOutputs(graph), msgspec.structs.replace(order, **where))


def test_each_rank_of_a_step_knows_its_nodes_and_the_other_ranks() -> None:
    for rank, here, others in ((0, [{"LLM"}, set()], (1,)), (1, [set(), {"LLM"}], (0,))):
        step = placed(ORPHEUS, rank, "prefill", "decode")

        assert [set(step.here(walk)) for walk in step.walks] == here
        assert step.others == others
        assert step.moves("LLM")
        assert (step.goes_on_at(0, "LLM"), step.goes_on_at(1, "LLM")) == (1, None)


def test_a_request_on_one_rank_has_no_others() -> None:
    step = placed(ORPHEUS, 0, "prefill", "decode", lives={})

    assert (step.is_alone, step.others, step.moves("LLM")) == (True, (), False)
    assert step.here(step.walks[1]) == {"LLM"}


def test_where_a_row_ends_it_speaks() -> None:
    text = registry.graph("decoder_lm")

    assert placed(text, 0, "prefill", "decode").tracks == {}
    assert placed(text, 1, "prefill", "decode").tracks == {"llm": ""}
    assert placed(text, 0, "prefill").tracks == {"llm": ""}
    assert not placed(text, 1, "prefill").is_sole_speaker("llm")


def test_an_echo_is_said_by_a_node_that_says_nothing_else() -> None:
    text = registry.graph("decoder_lm")

    assert placed(text, 1, "score").tracks == {}
    assert placed(text, 1, "score", args={"echo": "?"}).tracks == {"llm": ""}


def test_one_rank_tells_the_end_of_a_stream_the_one_that_fed_it_last() -> None:
    stream = ("token", "snac_decoder")

    assert placed(ORPHEUS, 0, "prefill", "decode", ends=("token",)).ends == ()
    assert placed(ORPHEUS, 1, "prefill", "decode", ends=("token",)).ends == (stream,)
    assert placed(ORPHEUS, 0, "prepare", ends=("token",)).ends == (stream,)
    assert placed(ORPHEUS, 1, "prefill", "decode").taker(stream) == 2
    with pytest.raises(BugError, match="no stream 'sound' to end"):
        _ = placed(ORPHEUS, 1, "prefill", ends=("sound",)).ends


def test_a_value_is_read_elsewhere_by_a_node_there_now_or_in_a_later_walk() -> None:
    ranks = dict.fromkeys(mesh.GRAPH.nodes, 0) | {"right": 1}
    step = placed(mesh.GRAPH, 1, "branches", placement=ranks)
    routes = {
        (route.edge, str(route.to)): route for node in step.walks[0].node_table for route in node.routes
    }

    assert step.is_read_elsewhere(0, routes["twice", "join"])
    assert not step.is_read_elsewhere(0, routes["twice", "KEEP"])
    both = placed(ORPHEUS, 0, "prefill", "decode")
    [kept] = both.walks[0].nodes["LLM"].routes
    assert both.is_read_elsewhere(0, kept)


def test_an_order_that_does_not_say_where_a_node_is_is_a_bug() -> None:
    with pytest.raises(BugError, match="on which rank node 'LLM' runs"):
        placed(ORPHEUS, 0, "decode", placement={"prepare": 0})
