from typing import Any

import pytest

from configs.placement import (
    NodeGroup,
    PlacementError,
    assign,
    home_of,
    leaders_of,
    nodes_on,
    rank_of,
    ranks_of,
    resolve,
    tp_group_of,
)
from models.base import EngineKind, ModelGraph
from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Fixed,
    Loop,
    Node,
    Sequential,
    StreamingEdge,
    StreamInput,
    compile_walk,
)
from shared.walks.language import Section
from tests.tiny.infilling.graph import GRAPH as INFILLING


def no_plan(request: Any) -> Any:
    raise NotImplementedError


SECTIONS: dict[str, Section] = {
    "prepare": Node("prepare"),
    "prefill": Sequential(Node("LLM", ["ids"], [Edge("state", "other")]), Node("other", ["state"])),
    "decode": Loop(
        "decode", Node("LLM", ["token"], [Edge("token", "LLM"), Edge("token", CLIENT("text"))]), 9
    ),
    "speak": Node("vocoder", ["codes"], [Edge("audio", CLIENT("audio"))]),
}
SPEAKER = ModelGraph(
    family="speaker",
    nodes={
        "prepare": EngineKind.CPU,
        "LLM": EngineKind.KV,
        "other": EngineKind.KV,
        "vocoder": EngineKind.STATELESS,
    },
    walks={name: compile_walk(name, section) for name, section in SECTIONS.items()},
    plan=no_plan,
    former_walks=frozenset({"decode_llm", "audio_gen"}),
)
LLM = {"node_names": ["LLM"], "ranks": [0]}
OTHER = {"node_names": ["other"], "ranks": [1]}
VOCODER = {"node_names": ["vocoder"], "ranks": [0]}
PLACED = [LLM, OTHER, VOCODER]


def resolved(*groups: dict[str, Any]) -> Any:
    return resolve([NodeGroup(**group) for group in groups], SPEAKER)


def where(groups: Any, chosen: list[int] | None = None) -> dict[tuple[str, str], int]:
    """The rank of every (walk, node), for a request that got these ranks, or the first of each group."""
    maps = assign(groups, chosen or [group.ranks[0] for group in groups])
    return {
        (walk, node): rank_of(*maps, walk, node)
        for walk, compiled in SPEAKER.walks.items()
        for node in compiled.nodes
    }


def test_a_node_without_walks_runs_on_its_rank_in_all_of_them() -> None:
    assert where(resolved(*PLACED)) == {
        ("prepare", "prepare"): 0,
        ("prefill", "LLM"): 0,
        ("prefill", "other"): 1,
        ("decode", "LLM"): 0,
        ("speak", "vocoder"): 0,
    }


def test_a_node_may_run_elsewhere_in_another_walk() -> None:
    groups = resolved(
        LLM | {"graph_walks": ["prefill"]},
        {"node_names": ["LLM"], "ranks": [2], "graph_walks": ["decode"]},
        OTHER,
        VOCODER,
    )

    assert (where(groups)["prefill", "LLM"], where(groups)["decode", "LLM"]) == (0, 2)
    assert assign(groups, [0, 2, 1, 0, 0])[1] == {"decode": {"LLM": 2}}
    assert ranks_of(groups) == [0, 1, 2]
    assert nodes_on(groups, 2) == ["LLM"]


def test_a_group_without_walks_takes_the_rest() -> None:
    groups = resolved(LLM | {"graph_walks": ["decode"], "ranks": [7]}, LLM, OTHER, VOCODER)

    assert (where(groups)["prefill", "LLM"], where(groups)["decode", "LLM"]) == (0, 7)
    assert home_of(groups, "decode", "LLM").ranks == (7,)
    assert home_of(groups, "prefill", "LLM").ranks == (0,)


def test_a_cpu_node_that_no_group_names_runs_on_the_lowest_rank() -> None:
    groups = resolved(LLM | {"ranks": [4]}, OTHER | {"ranks": [3]}, VOCODER | {"ranks": [5]})

    assert where(groups)["prepare", "prepare"] == 3


def test_one_that_is_named_runs_where_it_is_named() -> None:
    groups = resolved(*PLACED, {"node_names": ["prepare"], "ranks": [6]})

    assert where(groups)["prepare", "prepare"] == 6


def test_of_several_ranks_a_request_gets_the_one_that_is_chosen() -> None:
    groups = resolved(LLM | {"ranks": [2, 3]}, OTHER, VOCODER)

    assert where(groups, [3, 1, 0, 0])["decode", "LLM"] == 3
    assert nodes_on(groups, 2) == nodes_on(groups, 3) == ["LLM"]


def test_ranks_that_share_a_copy_are_one_replica_and_the_first_of_them_gets_the_orders() -> None:
    groups = resolved(
        {"node_names": ["LLM", "prepare"], "ranks": [2, 3, 6, 4], "tp_size": 2},
        OTHER,
        VOCODER | {"ranks": [2]},
    )

    assert groups[0].ranks == (2, 6)
    assert (leaders_of(groups), ranks_of(groups)) == ([1, 2, 6], [1, 2, 3, 4, 6])
    assert nodes_on(groups, 2) == ["LLM", "prepare", "vocoder"]
    assert nodes_on(groups, 3) == nodes_on(groups, 4) == ["LLM"], "a follower has its part and no more"
    assert tp_group_of(groups, 4) == tp_group_of(groups, 6) == (6, 4)
    assert tp_group_of(groups, 1) == (1,)


def test_a_cpu_node_that_no_group_names_does_not_run_on_a_follower() -> None:
    groups = resolved(LLM | {"ranks": [5, 0], "tp_size": 2}, OTHER | {"ranks": [3]}, VOCODER | {"ranks": [5]})

    assert where(groups)["prepare", "prepare"] == 3


def test_walks_that_are_no_more_place_nothing() -> None:
    groups = resolved(
        LLM | {"graph_walks": ["prefill", "decode", "decode_llm", "audio_gen"]},
        OTHER,
        VOCODER | {"graph_walks": ["audio_gen", "speak"]},
        {"node_names": ["vocoder"], "ranks": [9], "graph_walks": ["audio_gen"]},
    )

    assert [group.walks for group in groups] == [("prefill", "decode"), None, ("speak",), None]
    assert ranks_of(groups) == [0, 1]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([LLM | {"node_names": ["llm"]}], r"\[0\]: unknown node 'llm', did you mean 'LLM'\?; speaker has "),
        ([LLM, LLM], r"node_groups\[1\]: node 'LLM' is placed already by node_groups\[0\]"),
        (
            [LLM, *[OTHER | {"graph_walks": ["prefill"]}] * 2],
            r"\[2\]: node 'other' is placed already in walk 'prefill' by node_groups\[1\]",
        ),
        ([LLM, VOCODER], r"no node_group places \['other'\]; add them to a group's node_names"),
        (
            [LLM | {"graph_walks": ["prefill"]}, OTHER, VOCODER],
            r"no node_group places node 'LLM' in the walks \['decode'\]; .* of node_groups\[0\], or omit",
        ),
        (
            [*PLACED, LLM | {"graph_walks": ["prefill", "decode"], "ranks": [2]}],
            r"node_groups\[0\]: node 'LLM' has nothing to do there",
        ),
        (
            [LLM | {"graph_walks": ["decod"]}],
            r"\[0\]: graph_walks: unknown walk 'decod', did you mean 'decode'\?; speaker has \['decode', ",
        ),
        (
            [LLM | {"graph_walks": []}],
            r"graph_walks: expected at least one walk, or no such key \(all walks\)",
        ),
        ([LLM | {"graph_walks": ["speak"]}], r"walk 'speak' runs none of \['LLM'\], but \['vocoder'\]"),
        ([LLM | {"ranks": [1, 1]}], r"\[0\]: ranks: expected each once, found \[1, 1\]"),
        ([LLM | {"node_names": ["LLM", "LLM"]}], r"\[0\]: node_names: expected each once"),
        ([LLM | {"tp_size": 2}], r"\[0\]: 1 ranks do not divide by tp_size 2"),
        (
            [LLM, OTHER, VOCODER | {"ranks": [3, 4], "tp_size": 2}],
            r"\[2\]: tp_size is 2, but none of \['vocoder'\] can be shared: .* of speaker \['LLM', 'other'\]",
        ),
        (
            [LLM | {"ranks": [0, 1], "tp_size": 2}, OTHER | {"ranks": [3]}, VOCODER | {"ranks": [1]}],
            r"rank 1 follows another in a group with tp_size, and is in a second group",
        ),
        (
            [LLM | {"ranks": [0, 2], "tp_size": 2}, OTHER | {"ranks": [1, 2], "tp_size": 2}, VOCODER],
            r"the ranks \[0, 2\] share a node by tp_size, and would run \['LLM', 'other'\]",
        ),
        (
            [LLM | {"ranks": [0, 1], "tp_size": 2}, OTHER | {"ranks": [0]}, VOCODER],
            r"the ranks \[0, 1\] share a node by tp_size, and would run \['LLM', 'other'\]",
        ),
    ],
)
def test_what_cannot_be_placed_says_what_would_be_right(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        resolved(*groups)


def test_a_rank_may_have_two_nodes_with_keys_and_values() -> None:
    assert nodes_on(resolved(LLM, OTHER | {"ranks": [0]}, VOCODER), 0)[:2] == ["LLM", "other"]


def test_a_node_whose_tensors_stream_has_one_group_for_all_its_walks() -> None:
    sections: dict[str, Section] = {
        "think": Loop(
            "think",
            Node(
                "LLM",
                ["token"],
                [Edge("token", "LLM"), StreamingEdge("states", "other", chunks=Fixed(1), after_end="empty")],
            ),
            9,
        ),
        "prefill": Node("LLM", ["token_ids"], [Edge("token", KEEP)]),
        "talk": Loop("talk", Node("other", [StreamInput("states")]), 9),
    }
    walks = {name: compile_walk(name, section) for name, section in sections.items()}
    kinds = {"LLM": EngineKind.KV, "other": EngineKind.KV}
    graph = ModelGraph(family="talker", nodes=kinds, walks=walks, plan=no_plan)
    both = [NodeGroup(node_names=["LLM"], ranks=[0]), NodeGroup(node_names=["other"], ranks=[0])]
    assert nodes_on(resolve(both, graph), 0) == ["LLM", "other"]
    divided = NodeGroup(node_names=["LLM"], ranks=[1], graph_walks=["prefill"])
    with pytest.raises(PlacementError, match="node 'LLM' is placed in 2 groups, but the stream 'states'"):
        resolve([divided, *both], graph)


def test_a_node_with_token_programs_has_one_group_for_all_its_walks() -> None:
    both = [
        NodeGroup(node_names=["llm"], ranks=[0], graph_walks=["prefill"]),
        NodeGroup(node_names=["llm"], ranks=[1], graph_walks=["decode"]),
    ]
    with pytest.raises(PlacementError, match=r"node 'llm' is placed in 2 groups, but infilling generates"):
        resolve(both, INFILLING)
    assert nodes_on(resolve([NodeGroup(node_names=["llm"], ranks=[0, 1])], INFILLING), 1) == ["llm"]
