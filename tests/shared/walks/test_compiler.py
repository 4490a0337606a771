import subprocess
import sys

import pytest

from shared.walks import (
    CLIENT,
    KEEP,
    UNLIMITED,
    Edge,
    Fixed,
    LeftContext,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    StreamingEdge,
    StreamInput,
    WalkError,
    compile_walk,
)
from tests.shared.walks.sections import (
    BRANCHES,
    DECODE,
    DIFFUSION,
    GUIDED,
    PIPELINE,
    REFINE,
    ROLLOUT,
    SPEAK,
    SPOKEN,
    VOICE,
    even,
    never,
)

# ---- what a walk takes and gives -------------------------------------------------------------------


def test_in_a_sequential_what_an_earlier_section_feeds_is_internal() -> None:
    walk = compile_walk("walk", PIPELINE)
    assert walk.external_inputs == walk.inputs == {("image", "encode")}
    assert walk.external_outputs == {("output", CLIENT("text"))}
    assert walk.loop_back == frozenset()


def test_a_parallel_fed_from_outside_keeps_its_inputs() -> None:
    walk = compile_walk(
        "walk",
        Parallel(
            Node("vae_decoder", ["latents"], [Edge("image", CLIENT("image"))]),
            Node("audio_decoder", ["sound_latents"], [Edge("sound", CLIENT("audio"))]),
        ),
    )
    assert walk.external_inputs == {("latents", "vae_decoder"), ("sound_latents", "audio_decoder")}


@pytest.mark.parametrize("swapped", [False, True])
def test_what_a_sibling_feeds_is_internal_whichever_is_written_first(swapped: bool) -> None:
    producer = Node("producer", ["seed"], [Edge("x", "consumer")])
    consumer = Node("consumer", ["x", "cond"], [Edge("out", CLIENT("text"))])
    walk = compile_walk("walk", Parallel(consumer, producer) if swapped else Parallel(producer, consumer))
    assert walk.external_inputs == {("seed", "producer"), ("cond", "consumer")}
    assert walk.external_outputs == {("out", CLIENT("text"))}


def test_a_guided_loop_feeds_all_it_takes_back_to_itself() -> None:
    walk = compile_walk("walk", GUIDED)
    loop = walk.loops["image_gen"]
    back = {(edge, node) for edge in ("latents", "time_index") for node in (*BRANCHES, "combine")}
    assert len(back) == 8
    assert loop.loop_back == walk.loop_back == back
    assert loop.external_inputs == walk.external_inputs == frozenset()
    assert loop.external_outputs == {("latents", "vae_decoder")}
    assert walk.inputs == back  # the first values come from outside all the same
    assert walk.consumers == {
        name: tuple(sorted((*BRANCHES, "combine"))) for name in ("latents", "time_index")
    }


def test_a_loop_takes_from_outside_what_nothing_inside_feeds() -> None:
    walk = compile_walk("walk", DIFFUSION)
    assert walk.loops["denoise"].external_inputs == walk.external_inputs == {("prompt", "denoiser")}
    assert walk.loops["denoise"].loop_back == {("latents", "denoiser")}
    assert walk.inputs == {("prompt", "denoiser"), ("latents", "denoiser")}


def test_one_input_may_be_fed_back_by_each_of_several_loops() -> None:
    walk = compile_walk("walk", REFINE)
    assert walk.loops["denoise"].loop_back == walk.loops["refine"].loop_back == {("latents", "denoiser")}
    assert walk.loops["denoise"].lineage == (1, 2)
    assert walk.loops["denoise"].parent == walk.loops["refine"].index == 1


def test_a_loop_back_whose_first_value_the_walk_makes_is_not_asked_for() -> None:
    init = Node("init", ["seed"], [Edge("latents", "denoiser")])
    assert compile_walk("walk", Sequential(init, DIFFUSION)).inputs == {
        ("seed", "init"),
        ("prompt", "denoiser"),
    }


@pytest.mark.parametrize(
    ("section", "resident"),
    [
        (DECODE, {"decode": True}),
        (Loop("decode", Sequential(Parallel(DECODE.body)), 3), {"decode": True}),
        (REFINE, {"refine": False, "denoise": True}),
        (GUIDED, {"image_gen": False}),
        (Loop("outer", DECODE, 2), {"outer": False, "decode": True}),
    ],
)
def test_a_loop_over_one_single_node_is_resident(section: Section, resident: dict[str, bool]) -> None:
    walk = compile_walk("walk", section)
    assert {name: loop.resident for name, loop in walk.loops.items()} == resident


def test_a_walk_tells_which_arguments_it_needs() -> None:
    assert compile_walk("walk", DECODE).args == {"max_tokens"}
    assert compile_walk("walk", DIFFUSION).args == frozenset()


def test_a_loop_may_have_the_name_of_its_walk_and_of_its_node() -> None:
    section = Loop("decode", Node("decode", ["token"], [Edge("token", "decode")]), 3)
    assert set(compile_walk("decode", section).loops) == {"decode"}


# ---- streams and guards ----------------------------------------------------------------------------


def test_a_stream_is_no_input_of_the_walk_for_another_walk_feeds_it() -> None:
    walk = compile_walk("walk", VOICE)
    assert walk.inputs == walk.external_inputs == frozenset()
    assert walk.consumers == {}
    node = walk.nodes["vocoder"]
    assert (node.inputs, node.streams, node.input_count) == ((), ("token",), 1)
    assert walk.loops["voice"].resident


def test_a_streaming_edge_leads_nowhere_in_its_own_walk() -> None:
    walk = compile_walk("walk", SPEAK)
    node = walk.nodes["llm"]
    assert node.streaming == (SPOKEN,)
    assert node.outputs == {"token", "n"}
    assert node.streamed == frozenset()  # its one streaming edge is also an edge of the walk
    assert [route.to for route in node.routes] == ["llm", KEEP]
    alone = compile_walk("walk", Node("llm", ["token"], [SPOKEN])).nodes["llm"]
    assert not alone.outputs
    assert alone.streamed == {"token"}


def test_a_loop_without_a_limit_runs_until_it_is_stopped() -> None:
    assert compile_walk("walk", VOICE).max_iters({}) == [1, UNLIMITED]


def test_what_is_optional_is_found_to_be_missable_through_a_skipped_node() -> None:
    section = Sequential(
        Node("a", [], [Edge("x", "b", even)]),
        Node("b", ["x"], [Edge("y", "c")]),
        Node("c", ["y"], optional=["y"]),
    )
    assert compile_walk("walk", section).nodes["c"].optional == {"y"}
    assert compile_walk("walk", section).guarded
    assert not compile_walk("walk", SPEAK).guarded


# ---- what is wrong ---------------------------------------------------------------------------------

A, B = Node("a", ["x"], [Edge("y", "b")]), Node("b", ["y"], [Edge("z", KEEP)])
KEPT = Edge("z", KEEP)


def test_errors_name_the_walk() -> None:
    with pytest.raises(WalkError, match=r"^walk 'image_gen': edge 'y' of node 'a' goes to 'b'"):
        compile_walk("image_gen", A)


def test_a_walk_needs_a_name_and_a_section() -> None:
    with pytest.raises(WalkError, match="a walk is named 'no name'"):
        compile_walk("no name", A)
    with pytest.raises(WalkError, match="must be a Node, Sequential, Parallel or Loop"):
        compile_walk("walk", "a")  # type: ignore[arg-type]  # what an untyped caller may pass


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (A, r"goes to 'b', which is unknown; the nodes are \['a'\]"),
        (
            Sequential(A, Loop("b", Node("c", ["y"]), 2)),
            "goes to 'b', which is a loop, not a node; send it to a node inside",
        ),
        (
            Sequential(A, Node("b", ["q", "p"])),
            r"edge 'y' of node 'a' goes to node 'b', which has no such input; it takes \['p', 'q'\]",
        ),
        (Sequential(A, Node("a")), "two nodes are named 'a'; rename one"),
        (Sequential(Loop("l", A, 2), Loop("l", B, 2)), "two loops are named 'l'; rename one"),
        (
            Sequential(B, A),
            "edge 'y' of node 'a' goes back to node 'b', but no loop is around both; put them into one",
        ),
        (Node("a", ["y"], [Edge("y", "a")]), "goes back to node 'a', but no loop is around both"),
        (
            Sequential(A, Loop("l", Node("b", ["y"], [KEPT]), 2, outputs=["ghost"])),
            "edge 'z' of node 'b' leaves loop 'l' for KEEP; name it in the loop's outputs",
        ),
        (
            Sequential(Loop("l", A, 2), B),
            "edge 'y' of node 'a' leaves loop 'l' for node 'b'; name it in the loop's outputs",
        ),
        (
            Sequential(Loop("outer", Loop("inner", A, 2, outputs=["y"]), 2), B),
            "edge 'y' of node 'a' leaves loop 'outer'",
        ),
        (
            Loop("l", Node("b", ["y"], [KEPT]), 2, outputs=["z", "ghost"]),
            r"loop 'l' declares 'ghost', but no edge of that name leaves it; \['z'\] do",
        ),
        (
            Loop("l", Node("b", ["y"], [KEPT]), 2, outputs=["z"], accumulated=["ghost"]),
            "loop 'l' declares 'ghost'",
        ),
        (
            Loop("l", Node("b", ["y"], [Edge("y", "b")]), 2, outputs=["y"]),
            r"loop 'l' declares 'y', but no edge of that name leaves it; \[\] do",
        ),
        (
            Sequential(A, Node("a2", ["x"], [Edge("y", "b")]), B),
            r"input 'y' of node 'b' is fed twice in one iteration of the walk, by nodes \['a', 'a2'\]; ren",
        ),
        (
            Loop("l", Sequential(A, Node("b", ["y"], [Edge("y", "b")])), 2),
            r"input 'y' of node 'b' is fed twice in one iteration of loop 'l', by nodes \['a', 'b'\]",
        ),
        (
            Loop(
                "o",
                Sequential(Loop("i", Sequential(A, Node("b", ["y"])), 2), Node("c", [], [Edge("y", "b")])),
                2,
            ),
            r"input 'y' of node 'b' is fed twice in one iteration of loop 'i', by nodes \['a', 'c'\]",
        ),
        (
            Sequential(Node("llm", [], [Edge("token", "vocoder")]), VOICE),
            "edge 'token' of node 'llm' goes to node 'vocoder', which takes it as a stream; streams come fr",
        ),
        (
            Sequential(Node("llm", [], [SPOKEN]), VOICE),
            "streaming edge 'token' of node 'llm' goes to node 'vocoder' of the same walk; a stream connects",
        ),
        (
            Node("a", ["x"], optional=["x"]),
            r"input 'x' of node 'a' is declared optional, but every path supplies it; add a guard \(when\)",
        ),
        (
            Loop(
                "l", Sequential(Node("a", ["x"], optional=["x"]), Node("b", [], [Edge("x", "a", never)])), 2
            ),  # back: the next iteration sees what it saw before
            "input 'x' of node 'a' is declared optional, but every path supplies it",
        ),
        (
            Sequential(
                Node("a", [], [Edge("y", "c", even)]), Node("b", [], [Edge("y", "c")]), Node("c", ["y"])
            ),
            "input 'y' of node 'c' is fed twice in one iteration of the walk",
        ),
        (
            Parallel(Node("a", [], [KEPT]), Node("b", [], [KEPT])),
            "edge 'z' of node 'b' goes to KEEP, and so does another of that name; rename one",
        ),
        (
            Parallel(Node("a", ["y"], [Edge("x", "b")]), Node("b", ["x"], [Edge("y", "a")])),
            "no node can start an iteration of the walk: node '.' -> node '.' -> node '.' feed",
        ),
        (
            Loop(
                "l",
                Parallel(
                    Loop("i", Parallel(Node("a", ["y"]), Node("a2", [], [Edge("x", "b")])), 2, outputs=["x"]),
                    Node("b", ["x"], [Edge("y", "a")]),
                ),
                2,
            ),
            "no node can start an iteration of loop 'l': .*loop 'i' -> .*feed one another",
        ),
    ],
)
def test_a_wrong_walk_is_refused_when_it_is_built(section: Section, message: str) -> None:
    with pytest.raises(WalkError, match=message):
        compile_walk("walk", section)


def test_one_name_may_go_to_the_client_from_several_nodes() -> None:
    tokens = [Edge("token", CLIENT("text"))]
    walk = compile_walk("walk", Sequential(Node("prefill", [], tokens), Node("decode", [], tokens)))
    assert walk.external_outputs == {("token", CLIENT("text"))}


# ---- the description -------------------------------------------------------------------------------


def test_equal_walks_have_equal_descriptions() -> None:
    again = Sequential(*DIFFUSION.sections)
    assert compile_walk("walk", again).describe() == compile_walk("walk", DIFFUSION).describe()


def test_whatever_changes_a_walk_changes_its_description() -> None:
    def node(*edges: Edge | StreamingEdge, inputs: tuple[str, ...] = ("x",)) -> Node:
        return Node("n", inputs, edges)

    emit, keep = Edge("x", CLIENT("text")), Edge("x", KEEP)
    sections: list[Section] = [
        node(),
        node(emit),
        node(keep),
        node(emit, keep),
        node(keep, emit),
        node(Edge("x", CLIENT("audio"))),
        node(emit, inputs=("x", "y")),
        Node("client", ("x",), (emit,)),
        Sequential(node(emit)),
        Parallel(node(emit)),
        Loop("l", node(emit), 2),
        Loop("l", node(emit), 3),
        Loop("l", node(emit), "n"),
        Loop("m", node(emit), 2),
        Loop("l", node(emit), 2, outputs=["x"]),
        Loop("l", node(emit), 2, accumulated=["x"]),
        Loop("l", node(emit, Edge("x", "n")), 2),
        Loop("l", node(emit), None),
        node(Edge("x", CLIENT("text"), even)),
        node(Edge("x", CLIENT("text"), never)),
        Node("n", [StreamInput("x")], [emit]),
        *(node(StreamingEdge("x", "m", chunks)) for chunks in (Fixed(2), Fixed(3), LeftContext(3, 1))),
        node(StreamingEdge("x", "o", Fixed(2))),
        node(StreamingEdge("x", "m", Fixed(2), after_end="empty")),
        node(StreamingEdge("x", "m", Fixed(2), only=(0, 5))),
        Sequential(node(), Node("m", [], [Edge("y", "o", even)]), Node("o", ["y"])),
        Sequential(node(), Node("m", [], [Edge("y", "o", even)]), Node("o", ["y"], optional=["y"])),
    ]
    descriptions = {str(compile_walk("walk", section).describe()) for section in sections}
    assert len(descriptions) == len(sections)
    assert str(compile_walk("other", sections[0]).describe()) not in descriptions


def test_a_walk_without_streams_and_guards_is_described_as_ever() -> None:
    """Recorded requests contain a digest of this description."""
    token = [["token", "node", "llm"], ["token", "client", "text"]]
    assert compile_walk("decode", DECODE).describe() == {
        "walk": "decode",
        "section": ["loop", "decode", "max_tokens", [], [], ["node", "llm", ["token"], token]],
    }
    frame = [["x", "node", "predictor"], ["x", "keep"], ["pred", "keep"]]
    assert compile_walk("walk", Sequential(ROLLOUT)).describe()["section"] == [
        "sequential",
        ["loop", "rollout", 3, ["x"], ["pred"], ["node", "predictor", ["x"], frame]],
    ]


def test_streams_and_guards_are_described_as_plain_data() -> None:
    section = Sequential(
        Node("a", [StreamInput("x")], [Edge("y", "b", even), SPOKEN]), Node("b", ["y"], optional=["y"])
    )
    assert compile_walk("walk", section).describe()["section"] == [
        "sequential",
        [
            "node",
            "a",
            [["stream", "x"]],
            [
                ["y", "node", "b", "when", "tests.shared.walks.sections:even"],
                ["token", "stream", "vocoder", ["sliding_window", 28, 7], "stop", [100, 200]],
            ],
        ],
        ["node", "b", ["y"], [], ["optional", "y"]],
    ]


@pytest.mark.processes
def test_the_description_is_the_same_in_every_process() -> None:
    code = (
        "from shared.walks import compile_walk; from tests.shared.walks import sections as s;"
        "print(*(compile_walk('walk', x).describe() for x in (s.GUIDED, s.REFINE, s.SPEAK)))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        for seed in ("1", "2")
    ]
    here = " ".join(str(compile_walk("walk", section).describe()) for section in (GUIDED, REFINE, SPEAK))
    assert [run.stdout.strip() for run in runs] == [here, here]


def test_a_compiled_walk_cannot_be_changed() -> None:
    walk = compile_walk("walk", DECODE)
    with pytest.raises(AttributeError):
        walk.name = "other"  # type: ignore[misc]  # that is the point
    with pytest.raises(TypeError):
        walk.nodes["x"] = walk.nodes["llm"]  # type: ignore[index]  # that is the point
