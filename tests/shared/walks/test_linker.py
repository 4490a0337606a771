from collections.abc import Mapping

import pytest

from models.base import EngineKind, ModelGraph
from shared.walks import (
    CLIENT,
    CompiledWalk,
    Edge,
    Fixed,
    LeftContext,
    Loop,
    Node,
    Section,
    SlidingWindow,
    StreamingEdge,
    StreamInput,
    StreamLink,
    WalkError,
    compile_walk,
    link_streams,
)
from tests.shared.walks.sections import PIPELINE, SPEAK, SPOKEN, VOICE

PREFILL = Node("llm", ["prompt"], [SPOKEN])
SILENT = Node("vocoder", ["token"], [Edge("audio", CLIENT("audio"))])


def compiled(**sections: Section) -> dict[str, CompiledWalk]:
    return {name: compile_walk(name, section) for name, section in sections.items()}


def other(**changed: object) -> Node:
    edge = {"chunks": SPOKEN.chunks, "after_end": SPOKEN.after_end, "only": SPOKEN.only, **changed}
    return Node("llm", ["prompt"], [StreamingEdge("token", "vocoder", **edge)])  # type: ignore[arg-type]  # as above


def test_several_walks_may_feed_one_stream() -> None:
    assert link_streams(compiled(prefill=PREFILL, decode=SPEAK, voice=VOICE)) == {
        ("token", "vocoder"): StreamLink(
            policy=SlidingWindow(28, 7),
            after_end="stop",
            only=(100, 200),
            producers=(("prefill", "llm"), ("decode", "llm")),
            consumer_walk="voice",
        )
    }


def test_one_name_may_stream_to_several_nodes_and_a_node_may_take_several_streams() -> None:
    found = link_streams(
        compiled(
            speak=Node(
                "llm",
                [],
                [
                    StreamingEdge("token", "vocoder", Fixed(1)),
                    StreamingEdge("token", "face", LeftContext(3, 1)),
                    StreamingEdge("mood", "face", Fixed(2), after_end="empty"),
                ],
            ),
            voice=VOICE,
            face=Node("face", [StreamInput("token"), StreamInput("mood")]),
        )
    )
    assert {pair: (info.policy, info.after_end, info.consumer_walk) for pair, info in found.items()} == {
        ("token", "vocoder"): (Fixed(1), "stop", "voice"),
        ("token", "face"): (LeftContext(3, 1), "stop", "face"),
        ("mood", "face"): (Fixed(2), "empty", "face"),
    }


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"decode": SPEAK},
            r"node 'llm' streams 'token' to node 'vocoder', which is unknown; the nodes are \['llm'\]",
        ),
        (
            {"decode": SPEAK, "voice": SILENT},
            r"walk 'decode': node 'llm' streams 'token' to node 'vocoder', which takes the streams \[\]",
        ),
        (
            {"decode": PIPELINE, "voice": VOICE},
            "walk 'voice': node 'vocoder' takes the stream 'token', but no other walk feeds it; list",
        ),
        (
            {"decode": SPEAK, "voice": VOICE, "voice_again": VOICE},
            r"walks \['voice', 'voice_again'\] both take the stream 'token' with node 'vocoder'; a stream",
        ),
        (
            {"prefill": other(chunks=Fixed(7)), "decode": SPEAK, "voice": VOICE},
            "walk 'decode': node 'llm' streams 'token' to node 'vocoder' as .*SlidingWindow.*, and walk",
        ),
        (
            {"prefill": other(after_end="empty"), "decode": SPEAK, "voice": VOICE},
            "as .*'stop'.*, and walk 'prefill' as .*'empty'.*; one stream is cut in one way: use one edge",
        ),
        (
            {"decode": SPEAK, "voice": Loop("outer", VOICE, 2)},
            r"'vocoder' takes the stream 'token' inside of the loops \['outer', 'voice'\]; the stream's end",
        ),
        ({"prefill": other(only=None), "decode": SPEAK, "voice": VOICE}, "as .*100.*, and walk .* as .*None"),
    ],
)
def test_both_ends_of_a_stream_must_agree(sections: Mapping[str, Section], message: str) -> None:
    walks = compiled(**sections)
    with pytest.raises(WalkError, match=message):
        link_streams(walks)
    with pytest.raises(WalkError, match=message):
        graph(walks)


def test_a_models_graph_knows_its_streams() -> None:
    walks = compiled(prefill=PREFILL, decode=SPEAK, voice=VOICE)
    assert graph(walks).streams == link_streams(walks)
    assert graph(compiled(caption=PIPELINE)).streams == {}


def graph(walks: Mapping[str, CompiledWalk]) -> ModelGraph:
    def plan(request: object) -> object:
        raise AssertionError("nothing is planned")

    nodes = {node: EngineKind.STATELESS for walk in walks.values() for node in walk.nodes}
    return ModelGraph(family="spoken", nodes=nodes, walks=walks, plan=plan)  # type: ignore[arg-type]  # no plan
