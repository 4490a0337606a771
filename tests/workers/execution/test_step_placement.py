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


def placement(
    graph: ModelGraph, rank: int, *names: str, ends: tuple[str, ...] = (), **where: Any
) -> StepPlacement:
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
        step = placement(ORPHEUS, rank, "prefill", "decode")

        assert [set(step.local_nodes(walk)) for walk in step.walks] == here
        assert step.peer_ranks == others
        assert step.is_handed_over("LLM")
        assert (step.next_rank(0, "LLM"), step.next_rank(1, "LLM")) == (1, None)


def test_a_request_on_one_rank_has_no_peers() -> None:
    step = placement(ORPHEUS, 0, "prefill", "decode", lives={})

    assert (step.is_single_rank, step.peer_ranks, step.is_handed_over("LLM")) == (True, (), False)
    assert step.local_nodes(step.walks[1]) == {"LLM"}


def test_the_rank_that_ends_a_sequence_writes_its_track() -> None:
    text = registry.graph("decoder_lm")

    assert placement(text, 0, "prefill", "decode").tracks == {}
    assert placement(text, 1, "prefill", "decode").tracks == {"llm": ""}
    assert placement(text, 0, "prefill").tracks == {"llm": ""}
    assert not placement(text, 1, "prefill").is_only_writer("llm")


def test_an_echo_makes_a_node_without_other_output_an_output_node() -> None:
    text = registry.graph("decoder_lm")

    assert placement(text, 1, "score").tracks == {}
    assert placement(text, 1, "score", args={"echo": "?"}).tracks == {"llm": ""}


def test_the_rank_that_produced_a_stream_last_ends_it() -> None:
    stream = ("token", "snac_decoder")

    assert placement(ORPHEUS, 0, "prefill", "decode", ends=("token",)).streams_to_end == ()
    assert placement(ORPHEUS, 1, "prefill", "decode", ends=("token",)).streams_to_end == (stream,)
    assert placement(ORPHEUS, 0, "prepare", ends=("token",)).streams_to_end == (stream,)
    assert placement(ORPHEUS, 1, "prefill", "decode").consumer_rank(stream) == 2
    with pytest.raises(BugError, match="order to end stream 'sound'"):
        _ = placement(ORPHEUS, 1, "prefill", ends=("sound",)).streams_to_end


def test_a_value_is_read_by_peers_in_its_walk_or_a_later_one() -> None:
    ranks = dict.fromkeys(mesh.GRAPH.nodes, 0) | {"right": 1}
    step = placement(mesh.GRAPH, 1, "branches", placement=ranks)
    routes = {
        (route.edge, str(route.to)): route for node in step.walks[0].node_table for route in node.routes
    }

    assert step.is_read_by_peers(0, routes["twice", "join"])
    assert not step.is_read_by_peers(0, routes["twice", "KEEP"])
    both = placement(ORPHEUS, 0, "prefill", "decode")
    [kept] = both.walks[0].nodes["LLM"].routes
    assert both.is_read_by_peers(0, kept)


def test_an_order_without_the_rank_of_a_node_is_a_bug() -> None:
    with pytest.raises(BugError, match="to place node 'LLM' on a rank"):
        placement(ORPHEUS, 0, "decode", placement={"prepare": 0})
