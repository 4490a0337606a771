from collections.abc import Callable
from typing import Any

import pytest

from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Fixed,
    Loop,
    Node,
    Parallel,
    Sequential,
    StreamingEdge,
    StreamInput,
    WalkError,
    compile_walk,
)
from tests.shared.walks.sections import even, never

LLM = Node("llm", ["token"], [Edge("token", "llm")])
STREAMED = StreamingEdge("token", "vocoder", Fixed(3))
UNTYPED: Any = CLIENT, "x", None, StreamInput("x")
"""What a caller without a type checker may pass."""


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Node("a b"), "a node is named 'a b'; expected 1 to 64"),
        (lambda: Node(""), "a node is named ''"),
        (lambda: Edge("a/b", "x"), "an edge is named 'a/b'"),
        (lambda: CLIENT(""), "a modality is named ''"),
        (
            lambda: Edge("a", UNTYPED[0]),
            r"edge 'a': to must be a node's name, CLIENT\(\"text\"\) or KEEP, not <class",
        ),
        (lambda: Node("a", "token"), r"inputs must be a sequence of names, not 'token'; write \['token'\]"),
        (lambda: Node("a", ["x", "x"]), "node 'a': inputs list a name twice"),
        (
            lambda: Node("a", [], [UNTYPED[1]]),
            "node 'a': an output must be an Edge or a StreamingEdge, not 'x'",
        ),
        (lambda: Node("a", [], [Edge("x", KEEP)] * 2), "node 'a': outputs list an edge twice"),
        (
            lambda: Node("a", [], [Edge("x", KEEP, even), Edge("x", KEEP, never)]),
            "node 'a': outputs list an edge twice; list each name and destination once",
        ),
        (lambda: Node("a", [], [STREAMED, STREAMED]), "node 'a': outputs list an edge twice"),
        (
            lambda: Node("a", UNTYPED[3]),
            r"inputs must be a sequence of names, not StreamInput\(name='x'\); write",
        ),
        (lambda: Node("a", ["x", StreamInput("x")]), "node 'a': inputs list a name twice"),
        (
            lambda: Node("a", ["x", StreamInput("y")], optional=["y", "z"]),
            r"optional lists \['y', 'z'\], but only inputs that an Edge feeds .* has \['x'\]",
        ),
        (lambda: StreamInput("a b"), "a stream is named 'a b'"),
        (lambda: StreamingEdge("a b", "x", Fixed(1)), "a streaming edge is named 'a b'"),
        (
            lambda: StreamingEdge("a", UNTYPED[2], Fixed(1)),
            "streaming edge 'a': the node it goes to is named None",
        ),
        (
            lambda: StreamingEdge("a", "x", UNTYPED[1]),
            "streaming edge 'a': chunks must be a Fixed, SlidingWindow or LeftContext, not 'x'",
        ),
        (
            lambda: StreamingEdge("a", "x", Fixed(1), after_end=UNTYPED[1]),
            "streaming edge 'a': after_end must be \"stop\" or \"empty\", not 'x'",
        ),
        (
            lambda: StreamingEdge("a", "x", Fixed(1), only=(5, 5)),
            r"only must be two integers \(low, high\) with low < high, not \(5, 5\)",
        ),
        (lambda: StreamingEdge("a", "x", Fixed(1), only=UNTYPED[1]), "only must be two integers .*, not 'x'"),
        (
            lambda: Edge("a", KEEP, lambda _i, _args: True),
            "edge 'a': when must be a module-level function",
        ),
        (
            lambda: Edge("a", KEEP, UNTYPED[1]),
            "edge 'a': when must be a module-level function, .*; found 'x'",
        ),
        (Sequential, "a Sequential is empty"),
        (Parallel, "a Parallel is empty"),
        (
            lambda: Parallel(LLM, UNTYPED[1]),
            "a section must be a Node, Sequential, Parallel or Loop, not 'x'",
        ),
        (lambda: Loop("l", UNTYPED[2], 1), "loop 'l': the body: a section must be a Node"),
        (lambda: Loop("l", LLM, 0), "loop 'l': max_iters must be an integer of at least 1, not 0"),
        (lambda: Loop("l", LLM, True), "max_iters must be an integer of at least 1, not True"),
        (lambda: Loop("l", LLM, ""), "the argument for max_iters is named ''"),
        (lambda: Loop("l", LLM, 1, outputs="token"), "outputs must be a sequence of names"),
        (
            lambda: Loop("l", LLM, 3, outputs=["x", "pred"], accumulated=["pred"]),
            r"loop 'l': outputs and accumulated must be disjoint; both list \['pred'\]",
        ),
    ],
)
def test_a_wrong_part_is_refused_when_it_is_written(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(WalkError, match=message):
        build()


def test_an_error_of_a_walk_is_a_value_error() -> None:
    assert issubclass(WalkError, ValueError)


def test_parts_are_values() -> None:
    assert Node("a", ["x"], [Edge("y", KEEP)]) == Node("a", ("x",), (Edge("y", KEEP),))
    assert hash(Loop("l", Sequential(LLM), 3)) == hash(Loop("l", Sequential(LLM), 3))
    assert CLIENT("text") == CLIENT("text") != CLIENT("audio")
    parts: set[object] = {Sequential(LLM), Parallel(LLM), LLM, Sequential(LLM)}
    assert len(parts) == 3


def test_a_streaming_edge_takes_along_what_is_within_its_bounds() -> None:
    assert STREAMED.accepts(7)
    bounded = StreamingEdge("token", "vocoder", Fixed(3), only=(100, 103))
    assert [item for item in range(98, 106) if bounded.accepts(item)] == [100, 101, 102]


def test_a_node_tells_values_from_streams() -> None:
    node = Node("a", ["x", StreamInput("y"), "z"], [Edge("u", KEEP), STREAMED])
    assert (node.values, node.streams) == (("x", "z"), ("y",))
    assert (node.edges, node.streaming) == ((Edge("u", KEEP),), (STREAMED,))


def test_destinations_show_as_they_are_written() -> None:
    assert [str(to) for to in (CLIENT("text"), KEEP)] == ['CLIENT("text")', "KEEP"]


# ---- released output ---------------------------------------------------------------------------------


def test_only_edges_to_the_client_say_what_a_released_value_means() -> None:
    with pytest.raises(WalkError, match="on_resume belongs to edges to CLIENT only"):
        Edge("image", KEEP, on_resume="keep")
    with pytest.raises(WalkError, match='must be "reproduce" or "keep", not \'stay\''):
        Edge("image", CLIENT("image"), on_resume="stay")  # type: ignore[arg-type]


def test_a_walk_whose_released_output_stands_is_another_walk_and_all_others_stay_what_they_were() -> None:
    def walk(**how: Any) -> dict[str, Any]:
        return compile_walk("w", Node("n", ["x"], [Edge("image", CLIENT("image"), **how)])).describe()

    assert walk() == walk(on_resume="reproduce") != walk(on_resume="keep")
    assert "on_resume" not in str(walk())


def test_a_node_means_the_same_by_all_its_outputs_of_one_modality() -> None:
    edges = [Edge("first", CLIENT("image")), Edge("second", CLIENT("image"), on_resume="keep")]
    with pytest.raises(WalkError, match="another edge of the node with another on_resume"):
        compile_walk("w", Node("n", ["x"], edges))
    other = Edge("second", CLIENT("latents"), on_resume="keep")
    assert [
        route.keeps_released
        for route in compile_walk("w", Node("n", ["x"], [edges[0], other])).nodes["n"].routes
    ] == [False, True]
