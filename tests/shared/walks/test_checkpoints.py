"""Checkpoints of loops: what is stored, and loops that could not begin with it."""

from typing import Any

import pytest

from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Loop,
    LoopCheckpoint,
    Node,
    Parallel,
    Section,
    Sequential,
    StreamInput,
    WalkError,
    WalkRun,
    compile_walk,
)
from tests.shared.walks.sections import DIFFUSION, even


def loop(*body: Section, outputs: tuple[str, ...] = ("x",), **more: Any) -> Loop:
    return Loop("steps", Sequential(*body), 9, outputs=outputs, checkpoint=2, **more)


STEP = Node("step", ["x", "goal"], [Edge("x", "step"), Edge("x", KEEP)])


def test_what_the_next_iteration_is_fed_is_stored() -> None:
    walk = compile_walk(
        "draw",
        Sequential(
            Node("encode", ["prompt"], [Edge("goal", "left")]),
            loop(
                Parallel(
                    Node("left", ["x", "goal"], [Edge("u", "join")]),
                    Node("right", ["x"], [Edge("v", "join")]),
                ),
                Node(
                    "join",
                    ["t", "u", "v"],
                    [Edge("x", "left"), Edge("x", "right"), Edge("t", "join"), Edge("x", KEEP)],
                ),
            ),
        ),
    )
    assert walk.checkpoints == (LoopCheckpoint(loop="steps", every=2, node="join", edges=("t", "x")),)
    assert compile_walk("walk", DIFFUSION).checkpoints == ()


def test_a_run_that_begins_with_a_checkpoint_ends_as_the_whole_one() -> None:
    walk = compile_walk("steps", Loop("steps", STEP, 9, outputs=("x",), checkpoint=2))
    fired: list[int] = []
    for begun in (0, 4, 6):
        run = WalkRun(walk)
        run.start({"x": begun, "goal": 1})
        fired.append(0)
        while firings := run.take_ready():
            [firing] = firings
            fired[-1] += 1
            x = firing.inputs["x"] + firing.inputs["goal"]
            run.complete(firing, {"x": x}, stops=("steps",) if x == 7 else ())
        assert run.outputs == {"x": 7}
    assert fired == [7, 3, 1]


def test_a_checkpoint_is_part_of_the_description() -> None:
    plain, kept = (compile_walk("w", Loop("steps", STEP, 9, ("x",), checkpoint=n)) for n in (0, 2))
    assert plain.describe() != kept.describe()
    assert "checkpoint" not in str(plain.describe())


TOKENS = Node("step", ["x", StreamInput("tokens")], [Edge("x", "step"), Edge("x", KEEP)])
REFUSED: dict[str, tuple[Section, str]] = {
    "two nodes feed it": (
        loop(
            Node("a", ["x"], [Edge("x", "a"), Edge("y", "b")]),
            Node("b", ["y", "z"], [Edge("z", "b"), Edge("x", KEEP)]),
        ),
        r"one node has to feed back all of its values, found \['a', 'b'\]",
    ),
    "nothing is fed back": (loop(Node("a", ["x"], [Edge("x", KEEP)])), r"found \[\]"),
    "a node feeds it first": (
        Sequential(Node("first", ["seed"], [Edge("x", "step")]), loop(STEP)),
        r"\['x'\] come from nodes of the walk",
    ),
    "a node outside takes the same input": (
        Sequential(loop(STEP), Node("show", ["x"], [Edge("image", KEEP)])),
        "no node outside takes",
    ),
    "nested": (Loop("outer", loop(STEP), 2, outputs=("x",)), "is nested"),
    "around another loop": (
        loop(
            Loop("inner", Node("a", ["y"], [Edge("y", "a"), Edge("y", "b")]), 2, outputs=("y",)),
            Node("b", ["x", "y"], [Edge("x", "b"), Edge("x", KEEP)]),
        ),
        "is nested",
    ),
    "a stream": (loop(TOKENS), "takes or gives streams"),
    "a condition": (
        loop(Node("step", ["x"], [Edge("x", "step", when=even), Edge("x", KEEP)])),
        "feeds values back under a condition",
    ),
    "a list": (
        loop(
            Node("step", ["x"], [Edge("x", "step"), Edge("frame", KEEP)]),
            outputs=(),
            accumulated=("frame",),
        ),
        "accumulates values",
    ),
    "output in every iteration": (
        loop(Node("step", ["x"], [Edge("x", "step"), Edge("frame", CLIENT("image"))]), outputs=()),
        "emits values in every iteration",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_could_not_begin_in_its_middle_is_refused(name: str) -> None:
    section, message = REFUSED[name]
    with pytest.raises(WalkError, match=f"loop 'steps' has checkpoints.*{message}"):
        compile_walk("w", section)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_a_checkpoint_is_a_number_of_iterations(value: Any) -> None:
    with pytest.raises(WalkError, match="checkpoint must be a number of iterations"):
        Loop("steps", STEP, 9, checkpoint=value)
