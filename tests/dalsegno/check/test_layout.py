"""The layout of Orpheus on one, two and three ranks."""

from typing import Any

import pytest

from configs.placement import NodeGroup, PlacedGroup, resolve
from dalsegno.check import layout
from models import registry
from models.base import EngineKind, ModelGraph
from shared.walks import CLIENT, Edge, Loop, Node, Sequential, compile_walk
from shared.walks.chunks import Fixed, LeftContext, SlidingWindow

ORPHEUS = registry.graph("orpheus")
PREFILL = {"node_names": ["LLM"], "ranks": [0], "graph_walks": ["prefill"]}
DECODE = {"node_names": ["LLM"], "ranks": [1], "graph_walks": ["decode"]}
SNAC = {"node_names": ["snac_decoder"], "ranks": [2]}


def placed(*groups: dict[str, Any], graph: ModelGraph = ORPHEUS) -> tuple[PlacedGroup, ...]:
    return resolve([NodeGroup(**group) for group in groups], graph)


def between_ranks(groups: tuple[PlacedGroup, ...]) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    return [
        (link.kind, link.name, link.sources, link.targets)
        for link in layout.links(ORPHEUS, groups)
        if link.leaves_its_rank
    ]


def test_on_one_rank_nothing_leaves_it_and_streams_are_told() -> None:
    groups = placed({"node_names": ["LLM", "snac_decoder"], "ranks": [0]})

    assert between_ranks(groups) == []
    assert {link.kind for link in layout.links(ORPHEUS, groups)} == {"kept", "stream"}
    assert layout.places(groups) == [(0,)]


def test_on_three_ranks_keys_and_values_move_and_tokens_stream_from_where_they_end() -> None:
    groups = placed(PREFILL, DECODE, SNAC)

    assert between_ranks(groups) == [
        ("kept", "token", (0,), (1,)),
        ("kv", "KV of LLM", (0,), (1,)),
        ("stream", "token", (1,), (2,)),
    ]
    assert [
        (one.node, one.walks, one.ranks, one.puts_out) for one in layout.node_placements(ORPHEUS, groups)
    ] == [
        ("prepare", ("prepare",), (0,), ()),
        ("LLM", ("prefill",), (0,), ()),
        ("LLM", ("decode",), (1,), ()),
        ("snac_decoder", ("snac_chunk",), (2,), ("audio",)),
    ]


def test_where_nothing_moves_every_walk_streams() -> None:
    groups = placed({"node_names": ["LLM"], "ranks": [0]}, SNAC)

    streams = [link.source for link in layout.links(ORPHEUS, groups) if link.kind == "stream"]
    assert streams == [("prefill", "LLM"), ("decode", "LLM")]


def test_replicas_are_one_place_where_they_run_the_same() -> None:
    groups = placed(
        {"node_names": ["LLM"], "ranks": [1, 3]}, {"node_names": ["snac_decoder"], "ranks": [2, 3]}
    )

    assert layout.places(groups) == [(1,), (2,), (3,)]
    assert layout.places(placed({"node_names": ["LLM", "snac_decoder"], "ranks": [4, 5]})) == [(4,), (5,)]
    assert layout.places(placed({"node_names": ["LLM"], "ranks": [1, 2]}, SNAC | {"ranks": [0]})) == [
        (0,),
        (1, 2),
    ]


def test_what_may_stay_on_a_rank_is_told_from_what_never_does() -> None:
    links = layout.links(ORPHEUS, placed(PREFILL | {"ranks": [0, 1]}, DECODE | {"ranks": [1]}, SNAC))

    assert {link.always_leaves for link in links if link.kind == "kv"} == {False}
    assert {link.always_leaves for link in links if link.kind == "stream"} == {True}


def test_a_loop_over_ranks_is_found() -> None:
    body = Sequential(
        Node("draw", ["image"], [Edge("image", "look")]), Node("look", ["image"], [Edge("image", "draw")])
    )
    refiner = ModelGraph(
        family="refiner",
        nodes={"draw": EngineKind.STATELESS, "look": EngineKind.STATELESS},
        walks={"refine": compile_walk("refine", Loop("refine", body, 3))},
        plan=ORPHEUS.plan,
    )
    apart = placed(
        {"node_names": ["draw"], "ranks": [0]}, {"node_names": ["look"], "ranks": [1]}, graph=refiner
    )
    together = placed({"node_names": ["draw", "look"], "ranks": [0, 1]}, graph=refiner)

    assert list(layout.loops_over_ranks(refiner, apart)) == [("refine", "refine", [0, 1])]
    assert list(layout.loops_over_ranks(refiner, together)) == []
    assert [(link.kind, link.source[1], link.target[1]) for link in layout.links(refiner, apart)] == [
        ("edge", "draw", "look"),
        ("edge", "look", "draw"),
    ]


def test_what_goes_to_the_client_is_no_link() -> None:
    walk = compile_walk("say", Node("say", [], [Edge("text", CLIENT("text"))]))
    speaker = ModelGraph(
        family="speaker", nodes={"say": EngineKind.CPU}, walks={"say": walk}, plan=ORPHEUS.plan
    )
    groups = placed({"node_names": ["say"], "ranks": [0]}, graph=speaker)

    assert layout.links(speaker, groups) == []
    assert layout.node_placements(speaker, groups)[0].puts_out == ("text",)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Fixed(5), "5 at a time"),
        (SlidingWindow(28, 7), "windows of 28, every 7"),
        (LeftContext(25, 3), "25 at a time, with the 3 before"),
    ],
)
def test_a_cut_is_told_in_words(policy: Any, words: str) -> None:
    assert layout.cut(policy) == words
