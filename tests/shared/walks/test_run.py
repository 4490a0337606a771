import copy
from typing import Any

import pytest

from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Emission,
    Firing,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    StreamInput,
    WalkError,
    WalkRun,
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
    drive,
    even,
    guided,
    never,
    odd,
)


def begin(section: Section, args: dict[str, Any] | None = None, **inputs: Any) -> WalkRun:
    run = WalkRun(compile_walk("walk", section), args)
    run.start(inputs)
    return run


def state(run: WalkRun) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in vars(run).items() if name != "walk"}


# ---- whole walks -----------------------------------------------------------------------------------


def test_a_pipeline_takes_one_input_to_one_output_and_again_in_the_next_run() -> None:
    walk = compile_walk("walk", PIPELINE)
    for _ in range(2):
        run = WalkRun(walk)
        run.start({"image": "pixels"})
        trace = drive(run)
        assert [firing.node for firing in trace.firings] == ["encode", "decode"]
        assert [firing.inputs for firing in trace.firings] == [{"image": "pixels"}, {"features": "features0"}]
        assert trace.emissions == [Emission("output", CLIENT("text"), "output0", "decode", ())]
        assert run.done
        assert run.take_ready() == []


def test_a_diffusion_loop_denoises_three_times_and_decodes_the_last() -> None:
    run = begin(DIFFUSION, latents="noise", prompt="a cat")
    trace = drive(run)
    assert [(firing.node, firing.path) for firing in trace.firings] == [
        ("denoiser", (0,)),
        ("denoiser", (1,)),
        ("denoiser", (2,)),
        ("decoder", ()),
    ]
    assert [firing.inputs for firing in trace.firings] == [
        {"latents": "noise", "prompt": "a cat"},
        {"latents": "latents0", "prompt": "a cat"},
        {"latents": "latents1", "prompt": "a cat"},
        {"latents": "latents2"},
    ]
    assert trace.values("image") == ["image0"]
    assert run.done


def test_a_decode_stopped_at_the_fourth_token_fires_four_times() -> None:
    run = begin(DECODE, {"max_tokens": 10}, token="first")
    trace = drive(run, stops={"llm": 4})
    assert trace.emissions == [Emission("token", CLIENT("text"), f"token{i}", "llm", (i,)) for i in range(4)]
    assert run.done


def test_a_stop_leaves_nothing_behind_for_the_next_run_of_the_walk() -> None:
    walk = compile_walk("walk", DECODE)
    for stops, fired in (({"llm": 3}, 3), (None, 10)):
        run = WalkRun(walk, {"max_tokens": 10})
        run.start({"token": "first"})
        assert drive(run, stops=stops).fired("llm") == fired


def test_nested_loops_begin_anew_in_every_outer_iteration() -> None:
    run = begin(REFINE, latents="noise", prompt="a cat")
    trace = drive(run)
    assert (trace.fired("denoiser"), trace.fired("refiner"), trace.fired("decoder")) == (6, 2, 1)
    assert trace.firings[-1].node == "decoder"
    paths = [firing.path for firing in trace.firings if firing.node == "denoiser"]
    assert paths == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    seen = [firing.inputs["latents"] for firing in trace.firings if firing.node == "denoiser"]
    assert seen == ["noise", "latents0", "latents1", "latents0", "latents3", "latents4"]
    assert all(firing.inputs["prompt"] == "a cat" for firing in trace.firings if firing.node == "denoiser")
    assert trace.values("image") == ["image0"]


def test_a_loop_that_holds_nothing_leaves_nothing_when_stopped() -> None:
    section = Loop("decode", Node("llm", ["token"], [Edge("token", "llm")]), max_iters=10)
    run = begin(section, token="first")
    trace = drive(run, stops={"llm": 3})
    assert (trace.fired("llm"), trace.emissions, run.outputs, run.accumulated) == (3, [], {}, {})
    assert run.done
    assert run.take_ready() == []


def test_guided_branches_fire_side_by_side_before_they_are_combined() -> None:
    run = begin(GUIDED, latents="noise", time_index=0)
    assert [firing.node for firing in run.take_ready()] == [*BRANCHES]
    run = begin(GUIDED, latents="noise", time_index=0)
    trace = drive(run)
    assert {name: trace.fired(name) for name in (*BRANCHES, "combine", "vae_decoder")} == {
        **dict.fromkeys((*BRANCHES, "combine"), 49),
        "vae_decoder": 1,
    }
    assert trace.firings[-1].inputs == {"latents": "latents48"}


def test_accumulated_values_come_in_the_order_of_iterations_and_outputs_are_the_last() -> None:
    run = begin(ROLLOUT, x="x")
    trace = drive(run)
    assert run.accumulated == {"pred": ["pred0", "pred1", "pred2"]}
    assert run.outputs == {"x": "x2"}
    assert trace.emissions == [
        Emission("x", KEEP, "x2", "predictor", ()),
        Emission("pred", KEEP, ["pred0", "pred1", "pred2"], "predictor", ()),
    ]


def test_an_early_stop_accumulates_what_there_was() -> None:
    run = begin(ROLLOUT, x="x")
    drive(run, stops={"predictor": 2})
    assert (run.accumulated, run.outputs) == ({"pred": ["pred0", "pred1"]}, {"x": "x1"})


def test_a_loop_may_hold_what_goes_to_the_client() -> None:
    node = Node("llm", ["actions"], [Edge("actions", "llm"), Edge("actions", CLIENT("action"))])
    run = begin(Loop("flow", node, 10, outputs=["actions"]), actions="noise")
    assert drive(run).emissions == [Emission("actions", CLIENT("action"), "actions9", "llm", ())]


@pytest.mark.parametrize(
    ("inner", "outer", "kept"),
    [
        ("outputs", "outputs", "y5"),
        ("outputs", "accumulated", ["y2", "y5"]),
        ("accumulated", "outputs", ["y3", "y4", "y5"]),
        ("accumulated", "accumulated", [["y0", "y1", "y2"], ["y3", "y4", "y5"]]),
    ],
)
def test_each_loop_an_edge_leaves_holds_it_in_its_own_way(inner: str, outer: str, kept: Any) -> None:
    node = Node("n", ["x"], [Edge("y", KEEP)])
    by_inner: dict[str, Any] = {inner: ["y"]}
    by_outer: dict[str, Any] = {outer: ["y"]}
    run = begin(Loop("outer", Loop("inner", node, 3, **by_inner), 2, **by_outer), x=0)
    drive(run)
    assert {**run.outputs, **run.accumulated} == {"y": kept}


def test_a_client_edge_passes_loops_that_do_not_name_it_and_waits_for_one_that_does() -> None:
    node = Node("n", ["x"], [Edge("y", CLIENT("text"))])
    run = begin(Loop("outer", Loop("inner", node, 2, outputs=["y"]), 2), x=0)
    assert [(e.value, e.path) for e in drive(run).emissions] == [("y1", (0,)), ("y3", (1,))]
    run = begin(Loop("outer", Loop("inner", node, 2), 2, accumulated=["y"]), x=0)
    assert [(e.value, e.path) for e in drive(run).emissions] == [(["y0", "y1", "y2", "y3"], ())]


def test_a_loop_between_two_that_feed_back_restores_what_the_outer_one_fed() -> None:
    node = Node("n", ["x"], [Edge("x", "n"), Edge("y", "m")])
    middle = Loop("middle", Loop("inner", node, 2, outputs=["y"]), 2, outputs=["y"])
    run = begin(Loop("outer", Sequential(middle, Node("m", ["y"], [Edge("x", "n")])), 2), x="first")
    seen = [(firing.path, firing.inputs["x"]) for firing in drive(run).firings if firing.node == "n"]
    assert seen == [
        ((0, 0, 0), "first"),
        ((0, 0, 1), "x0"),
        ((0, 1, 0), "first"),
        ((0, 1, 1), "x2"),
        ((1, 0, 0), "x0"),  # m's first
        ((1, 0, 1), "x4"),
        ((1, 1, 0), "x0"),
        ((1, 1, 1), "x6"),
    ]


def test_a_node_without_inputs_fires_by_itself_in_every_iteration() -> None:
    section = Loop("l", Sequential(Node("clock", [], [Edge("t", "n")]), Node("n", ["t"])), 2)
    trace = drive(begin(section))
    assert [(f.node, f.path) for f in trace.firings] == [
        ("clock", (0,)),
        ("n", (0,)),
        ("clock", (1,)),
        ("n", (1,)),
    ]


# ---- deliveries ------------------------------------------------------------------------------------


def test_a_third_delivery_of_an_edge_is_refused_and_changes_nothing() -> None:
    run = WalkRun(compile_walk("walk", PIPELINE))
    assert [run.deliver("image", "encode", value) for value in (1, 2)] == [True, True]
    before = state(run)
    assert not run.deliver("image", "encode", 3)
    assert state(run) == before
    assert run.take_ready() == [Firing("encode", {"image": 1}, ())]


@pytest.mark.parametrize(
    ("edge", "node"),
    [("unknown", "encode"), ("image", "unknown"), ("image", "decode"), ("features", "decode")],
)
def test_what_a_walk_does_not_take_is_refused_and_changes_nothing(edge: str, node: str) -> None:
    run = WalkRun(compile_walk("walk", PIPELINE))
    before = state(run)
    assert not run.deliver(edge, node, "value")
    assert state(run) == before


def test_a_second_delivery_is_for_the_next_iteration_and_those_after_it() -> None:
    section = Loop("l", Node("n", ["x"], [Edge("y", CLIENT("text"))]), 3)
    run = begin(section, x=1)
    assert run.deliver("x", "n", 2)
    assert [firing.inputs["x"] for firing in drive(run).firings] == [1, 2, 2]


def test_each_iteration_has_room_for_one_more_delivery() -> None:
    run = begin(Loop("l", Node("n", ["x"]), 3), x=1)
    seen = []
    for following in (2, 3, None):
        (firing,) = run.take_ready()
        seen.append(firing.inputs["x"])
        if following:
            assert run.deliver("x", "n", following)
            assert not run.deliver("x", "n", "a third")
        run.complete(firing, {})
    assert seen == [1, 2, 3]


def test_a_first_value_delivered_twice_does_not_replace_what_the_loop_feeds_back() -> None:
    run = begin(DECODE, {"max_tokens": 3}, token="first")
    assert run.deliver("token", "llm", "first")
    assert [firing.inputs["token"] for firing in drive(run).firings] == ["first", "token0", "token1"]


def test_deliveries_after_the_end_are_refused() -> None:
    run = begin(PIPELINE, image=1)
    drive(run)
    before = state(run)
    assert not run.deliver("image", "encode", 2)
    assert state(run) == before


def test_inputs_may_come_one_by_one_and_late() -> None:
    run = WalkRun(compile_walk("walk", DIFFUSION))
    assert run.deliver("latents", "denoiser", "noise")
    assert run.take_ready() == []
    assert run.deliver("prompt", "denoiser", "a cat")
    assert drive(run).values("image") == ["image0"]


@pytest.mark.parametrize("inputs", [{}, {"latents": 1}, {"latents": 1, "prompt": 2, "more": 3}])
def test_a_start_with_other_inputs_than_the_walk_takes_is_an_error(inputs: dict[str, int]) -> None:
    run = WalkRun(compile_walk("walk", DIFFUSION))
    before = state(run)
    with pytest.raises(WalkError, match=r"walk 'walk' takes the inputs \['latents', 'prompt'\], found"):
        run.start(inputs)
    assert state(run) == before


# ---- completions -----------------------------------------------------------------------------------


def test_a_duplicate_completion_is_refused_and_changes_nothing() -> None:
    run = begin(DECODE, {"max_tokens": 3}, token="first")
    (first,) = run.take_ready()
    assert run.complete(first, {"token": "a"}) is not None
    before = state(run)
    assert run.complete(first, {"token": "b"}) is None
    assert state(run) == before
    (second,) = run.take_ready()
    before = state(run)
    assert run.complete(first, {"token": "b"}) is None  # not taken for the second's
    assert state(run) == before
    assert run.complete(second, {"token": "c"}) is not None


def test_what_was_not_handed_out_cannot_be_completed() -> None:
    run = begin(PIPELINE, image=1)
    before = state(run)
    assert run.complete(Firing("encode", {"image": 1}, ()), {"features": 1}) is None
    assert run.complete(Firing("unknown", {}, ()), {}) is None
    assert state(run) == before


@pytest.mark.parametrize("outputs", [{}, {"features": 1, "more": 2}])
def test_a_node_must_produce_exactly_what_it_declares(outputs: dict[str, int]) -> None:
    run = begin(PIPELINE, image=1)
    (firing,) = run.take_ready()
    before = state(run)
    with pytest.raises(WalkError, match=r"node 'encode' must produce \['features'\], found"):
        run.complete(firing, outputs)
    assert state(run) == before


def test_a_firing_is_handed_out_once() -> None:
    run = begin(PIPELINE, image=1)
    assert len(run.take_ready()) == 1
    assert run.take_ready() == []


def test_what_a_node_does_to_its_inputs_does_not_reach_the_run() -> None:
    run = begin(Loop("l", Node("n", ["x"]), 2), x=1)
    (firing,) = run.take_ready()
    firing.inputs["x"] = "scribbled"
    run.complete(firing, {})
    assert run.take_ready()[0].inputs == {"x": 1}


# ---- stops -----------------------------------------------------------------------------------------


def test_a_stop_between_two_iterations_ends_the_loop_at_once() -> None:
    run = begin(DIFFUSION, latents="noise", prompt="a cat")
    (firing,) = run.take_ready()
    run.complete(firing, {"latents": "good enough"})
    assert run.stop("denoise") == []
    assert run.take_ready() == [Firing("decoder", {"latents": "good enough"}, ())]


def test_a_stop_that_ends_a_walk_returns_what_leaves_it() -> None:
    run = begin(ROLLOUT, x="x")
    (firing,) = run.take_ready()
    run.complete(firing, {"x": 1, "pred": 2})
    released = run.stop("rollout")
    assert [(e.edge, e.value) for e in released or []] == [("x", 1), ("pred", [2])]
    assert run.done


def test_a_stop_waits_for_the_iteration_under_way_and_may_come_twice() -> None:
    run = begin(GUIDED, latents="noise", time_index=0)
    firings = run.take_ready()
    assert run.stop("image_gen") == run.stop("image_gen") == []
    for firing in firings:
        run.complete(firing, {f"v_{firing.node}": "v"})
    (combine,) = run.take_ready()
    run.complete(combine, {"latents": "done", "time_index": 1})
    assert run.take_ready() == [Firing("vae_decoder", {"latents": "done"}, ())]


def test_a_loop_that_is_not_running_cannot_be_stopped() -> None:
    run = begin(DIFFUSION, latents="noise", prompt="a cat")
    before = state(run)
    assert run.stop("denoise") is None  # not begun
    assert state(run) == before
    trace = drive(run)
    assert trace.fired("denoiser") == 3
    before = state(run)
    assert run.stop("denoise") is None  # over
    assert state(run) == before


def test_stopping_an_unknown_loop_is_an_error() -> None:
    with pytest.raises(WalkError, match=r"has no loop 'denoiser'; its loops are \['denoise'\]"):
        begin(DIFFUSION, latents=0, prompt=0).stop("denoiser")


def test_an_inner_loop_stopped_once_runs_in_full_the_next_time() -> None:
    run = begin(REFINE, latents="noise", prompt="a cat")
    trace = drive(run, stops={"denoiser": 2})
    paths = [firing.path for firing in trace.firings if firing.node == "denoiser"]
    assert paths == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_stopping_an_outer_loop_lets_the_inner_one_run_to_its_end() -> None:
    run = begin(REFINE, latents="noise", prompt="a cat")
    (firing,) = run.take_ready()
    assert run.stop("refine") == []
    run.complete(firing, {"latents": 0})
    trace = drive(run)
    assert (1 + trace.fired("denoiser"), trace.fired("refiner"), trace.fired("decoder")) == (3, 1, 1)


def test_an_engine_that_keeps_a_resident_loop_inside_stops_it_and_completes_its_one_firing() -> None:
    run = begin(ROLLOUT, x="x")
    (firing,) = run.take_ready()
    run.stop("rollout")
    run.complete(firing, {"x": "the last", "pred": "its"})
    assert run.done
    assert run.outputs == {"x": "the last"}


# ---- arguments -------------------------------------------------------------------------------------


def test_an_argument_says_how_often_a_loop_may_run() -> None:
    assert drive(begin(DECODE, {"max_tokens": 5}, token="first")).fired("llm") == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"walk 'walk' needs the arguments \['max_tokens'\] for its loops; found \[\]"),
        ({"max_tokens": 0}, "loop 'decode': max_iters must be an integer of at least 1, not 0"),
        ({"max_tokens": "5"}, "not '5'"),
        ({"max_tokens": True}, "not True"),
    ],
)
def test_a_wrong_argument_is_an_error(args: dict[str, Any], message: str) -> None:
    with pytest.raises(WalkError, match=message):
        WalkRun(compile_walk("walk", DECODE), args)


# ---- guards ----------------------------------------------------------------------------------------


def paths(trace: Any, node: str) -> list[tuple[int, ...]]:
    return [firing.path for firing in trace.firings if firing.node == node]


def test_an_edge_whose_guard_is_false_sends_nothing_and_skips_the_node_it_goes_to() -> None:
    section = Loop(
        "l",
        Sequential(
            Node("a", [], [Edge("x", "b", even)]),
            Node("b", ["x"], [Edge("y", "c")]),
            Node("c", ["y"], [Edge("z", CLIENT("text"))]),
        ),
        5,
    )
    run = begin(section)
    trace = drive(run)
    assert paths(trace, "a") == [(i,) for i in range(5)]
    assert paths(trace, "b") == paths(trace, "c") == [(0,), (2,), (4,)]  # the skip goes on to what is behind
    assert [(e.value, e.path) for e in trace.emissions] == [("z0", (0,)), ("z1", (2,)), ("z2", (4,))]
    assert run.done


def test_a_node_fires_without_an_optional_input_that_is_missing() -> None:
    section = Loop(
        "denoise",
        Sequential(
            Node("text", ["latents"], [Edge("v", "combine")]),
            Node("image", ["latents"], [Edge("w", "combine", guided)]),
            Node("combine", ["v", "w"], [Edge("latents", "text"), Edge("latents", "image")], ["w"]),
        ),
        4,
    )
    trace = drive(begin(section, {"guided_steps": 2}, latents="noise"))
    assert [set(firing.inputs) for firing in trace.firings if firing.node == "combine"] == [
        {"v", "w"},
        {"v", "w"},
        {"v"},
        {"v"},
    ]
    assert trace.fired("image") == 4  # its output is guarded, not it


def test_an_edge_back_that_sends_nothing_leaves_the_value_as_it_was() -> None:
    section = Loop("l", Node("n", ["x"], [Edge("x", "n", odd)]), 5)
    seen = [firing.inputs["x"] for firing in drive(begin(section, x="first")).firings]
    assert seen == ["first", "first", "x1", "x1", "x3"]


def test_a_loop_around_that_feeds_nothing_back_restores_what_its_iteration_began_with() -> None:
    section = Loop(
        "outer",
        Sequential(
            Loop("inner", Node("n", ["x"], [Edge("x", "n"), Edge("y", "m")]), 2, ["y"]),
            Node("m", ["y"], [Edge("x", "n", odd)]),
        ),
        4,
    )
    seen = [f.inputs["x"] for f in drive(begin(section, x="first")).firings if f.node == "n"]
    assert seen == ["first", "x0", "first", "x2", "x1", "x4", "x1", "x6"]  # m's second, from then on


def test_a_guard_outside_of_a_loop_is_asked_for_iteration_0() -> None:
    section = Sequential(
        Node("a", [], [Edge("x", "b", even), Edge("y", "c", odd), Edge("z", KEEP, odd)]),
        Node("b", ["x"]),
        Node("c", ["y"]),
    )
    run = begin(section)
    assert [firing.node for firing in drive(run).firings] == ["a", "b"]
    assert (run.done, run.outputs) == (True, {})


def test_a_loop_holds_what_was_sent_and_what_never_was_skips_the_node_behind_it() -> None:
    def last_of(edge: Edge) -> Section:
        return Sequential(
            Loop("l", Node("n", [], [edge]), 4, [edge.name]), Node("m", ["y"], [Edge("y", KEEP)])
        )

    run = begin(last_of(Edge("y", "m", even)))
    assert [f.inputs for f in drive(run).firings if f.node == "m"] == [{"y": "y2"}]
    run = begin(last_of(Edge("y", "m", never)))
    assert drive(run).fired("m") == 0
    assert (run.done, run.outputs) == (True, {})
    run = begin(Loop("l", Node("n", [], [Edge("y", KEEP, odd)]), 5, accumulated=["y"]))
    drive(run)
    assert run.accumulated == {"y": ["y1", "y3"]}


def test_a_loop_of_which_nothing_fires_ends_and_not_only_after_all_its_iterations() -> None:
    section = Sequential(
        Node("a", [], [Edge("x", "n", never)]),
        Loop("voice", Node("n", ["x", StreamInput("token")], [Edge("y", "m")]), None, ["y"]),
        Node("m", ["y"]),
        Node("last", [], [Edge("z", KEEP)]),
    )
    run = begin(section)
    assert [firing.node for firing in run.take_ready()] == ["a", "last"]
    assert run.complete(Firing("a", {}, ()), {"x": 1}) == []
    assert run.awaited_streams() == []
    assert not run.feed("token", "n", "chunk")  # a skipped node takes nothing from its stream
    assert run.complete(Firing("last", {}, ()), {"z": 1}) is not None
    assert run.done


def test_a_walk_with_guards_begins_when_all_its_inputs_are_there() -> None:
    """Otherwise a skip could end an iteration before its first value arrives."""
    body = Sequential(Node("a", [], [Edge("x", "b", odd)]), Node("b", ["x", "y"], [Edge("z", KEEP)]))
    run = WalkRun(compile_walk("walk", Loop("l", body, 2, ["z"])))
    assert run.take_ready() == []
    assert run.deliver("y", "b", "given")
    trace = drive(run)
    assert [(f.node, f.path, f.inputs) for f in trace.firings] == [
        ("a", (0,), {}),
        ("a", (1,), {}),
        ("b", (1,), {"x": "x1", "y": "given"}),
    ]


def test_a_node_is_skipped_when_it_is_known_of_all_its_inputs_whether_they_come() -> None:
    inner = Sequential(Node("a", [], [Edge("x", "n", odd)]), Node("n", ["x", "y"], [Edge("z", KEEP)]))
    section = Sequential(Node("s", [], [Edge("y", "n")]), Loop("l", inner, 2, ["z"]))
    run = begin(section)
    s, a = run.take_ready()
    assert run.complete(a, {"x": "too early"}) == []
    assert run.take_ready() == []  # the iteration waits for what n was given, though it is skipped in it
    run.complete(s, {"y": "late"})
    assert [f.inputs for f in drive(run).firings] == [{}, {"x": "x0", "y": "late"}]


def test_a_guard_that_fails_changes_nothing() -> None:
    run = begin(Node("a", [], [Edge("x", KEEP, guided)]), {})  # without its argument
    (firing,) = run.take_ready()
    before = state(run)
    with pytest.raises(KeyError, match="guided_steps"):
        run.complete(firing, {"x": 1})
    assert state(run) == before


# ---- streams ---------------------------------------------------------------------------------------


def test_a_streaming_input_takes_one_chunk_in_each_firing_and_the_last_ends_its_loop() -> None:
    run = begin(VOICE)
    seen = []
    for chunk in range(3):
        assert run.take_ready() == []
        assert run.awaited_streams() == [("token", "vocoder")]
        assert run.feed("token", "vocoder", chunk, last=chunk == 2)
        assert (run.awaited_streams(), run.feed("token", "vocoder", "more")) == ([], False)
        (firing,) = run.take_ready()
        assert not run.feed("token", "vocoder", "while it fires")
        assert firing.ends == (("voice",) if chunk == 2 else ())
        run.complete(firing, {"audio": chunk})
        seen.append((firing.path, firing.inputs))
    assert seen == [((i,), {"token": i}) for i in range(3)]
    assert (run.done, run.take_ready(), run.awaited_streams()) == (True, [], [])


def test_a_streaming_input_outside_of_a_loop_takes_one_chunk() -> None:
    run = begin(Node("n", [StreamInput("token")]))
    assert run.feed("token", "n", "chunk", last=True)
    (firing,) = run.take_ready()
    assert (firing.inputs, firing.ends) == ({"token": "chunk"}, ())
    assert run.complete(firing, {}) == []
    assert run.done


def test_a_node_waits_for_a_chunk_when_everything_else_is_there() -> None:
    section = Loop("l", Sequential(Node("a", [], [Edge("x", "n")]), Node("n", ["x", StreamInput("s")])), 2)
    run = begin(section)
    (a,) = run.take_ready()
    assert (run.awaited_streams(), run.feed("s", "n", "early")) == ([], False)
    run.complete(a, {"x": 1})
    assert run.awaited_streams() == [("s", "n")]
    assert run.feed("s", "n", "chunk")
    assert run.take_ready()[0].inputs == {"x": 1, "s": "chunk"}


def test_a_node_may_take_two_streams_and_the_first_to_end_ends_the_loop() -> None:
    run = begin(Loop("l", Node("n", [StreamInput("s"), StreamInput("t")]), None))
    assert run.awaited_streams() == [("s", "n"), ("t", "n")]
    assert run.feed("s", "n", 1, last=True)
    assert (run.take_ready(), run.awaited_streams()) == ([], [("t", "n")])
    assert run.feed("t", "n", 2)
    (firing,) = run.take_ready()
    assert (firing.inputs, firing.ends) == ({"s": 1, "t": 2}, ("l",))
    run.complete(firing, {})
    assert run.done


@pytest.mark.parametrize(("edge", "node"), [("token", "unknown"), ("unknown", "vocoder")])
def test_a_chunk_of_what_is_no_stream_is_refused(edge: str, node: str) -> None:
    run = begin(VOICE)
    before = state(run)
    assert not run.feed(edge, node, "chunk")
    assert not run.deliver("token", "vocoder", "chunk")  # a stream is no input of the walk
    assert state(run) == before


def test_what_only_a_streaming_edge_takes_may_be_given_or_not() -> None:
    for outputs in ({}, {"token": 1}):
        run = begin(Node("llm", [], [SPOKEN]))
        (firing,) = run.take_ready()
        assert run.complete(firing, outputs) == []
        assert run.done
    run = begin(Node("llm", [], [SPOKEN, Edge("n", KEEP)]))
    (firing,) = run.take_ready()
    with pytest.raises(
        WalkError, match=r"must produce \['n'\], and may produce \['token'\] for streams, found"
    ):
        run.complete(firing, {"token": 1})
    assert run.complete(firing, {"n": 1}) is not None


def test_what_another_edge_takes_as_well_must_be_given() -> None:
    run = begin(SPEAK, token="first")
    (firing,) = run.take_ready()
    with pytest.raises(WalkError, match=r"must produce \['n', 'token'\], found \['n'\]"):
        run.complete(firing, {"n": 1})


# ---- memory ----------------------------------------------------------------------------------------


def test_a_value_is_alive_until_nobody_can_read_it() -> None:
    run = begin(DIFFUSION, latents="noise", prompt="a cat")
    seen = []
    while firings := run.take_ready():
        for firing in firings:
            seen.append(sorted(run.live_values()))
            run.complete(firing, outputs_of(firing))
    assert seen == [
        ["a cat", "noise"],
        ["a cat", "latents(0,)", "latents(0,)"],
        ["a cat", "latents(1,)", "latents(1,)"],
        ["latents(2,)"],
    ]
    assert run.live_values() == []  # the image went to the client


def outputs_of(firing: Firing) -> dict[str, Any]:
    return {"latents": f"latents{firing.path}"} if firing.node == "denoiser" else {"image": "image"}


def test_what_the_next_iteration_reads_is_alive_before_it_begins() -> None:
    run = begin(DIFFUSION, latents="noise", prompt="a cat")
    (firing,) = run.take_ready()
    run.complete(firing, outputs_of(firing))
    assert sorted(run.live_values()) == ["a cat", "latents(0,)", "latents(0,)"]


def test_what_every_iteration_makes_anew_is_not_alive_once_it_was_read() -> None:
    run = begin(GUIDED, latents="noise", time_index="t0")
    branches = run.take_ready()
    for firing in branches:
        run.complete(firing, {f"v_{firing.node}": f"v_{firing.node}"})
    assert {f"v_{name}" for name in BRANCHES} <= {*run.live_values()}
    (combine,) = run.take_ready()
    run.complete(combine, {"latents": "latents0", "time_index": "t1"})
    assert {*run.live_values()} == {"latents0", "t1"}


def test_what_a_walk_keeps_is_alive_one_by_one() -> None:
    run = begin(ROLLOUT, x="x")
    drive(run)
    assert sorted(run.live_values()) == ["pred0", "pred1", "pred2", "x2"]


def test_a_value_that_only_a_stopped_loop_would_read_again_is_not_alive() -> None:
    run = begin(Sequential(ROLLOUT, Node("m", ["late"])), x="x", late="late")
    m_waits = run.take_ready()
    assert [firing.node for firing in m_waits] == ["predictor", "m"]
    assert sorted(run.live_values()) == ["late", "x"]
    run.complete(m_waits[1], {})
    assert run.live_values() == ["x"]
    run.complete(m_waits[0], {"x": "x0", "pred": "p0"}, ("rollout",))
    assert sorted(run.live_values()) == ["p0", "x0"]


# ---- order -----------------------------------------------------------------------------------------


def test_firings_come_in_the_order_the_walk_was_written_whatever_arrived_first() -> None:
    section = Parallel(Node("b", ["x"]), Node("a", ["y"]), Node("c", ["z"]))
    run = WalkRun(compile_walk("walk", section))
    for edge, node in (("z", "c"), ("y", "a"), ("x", "b")):
        run.deliver(edge, node, 0)
    assert [firing.node for firing in run.take_ready()] == ["b", "a", "c"]


def test_an_optional_input_that_a_guard_keeps_away_is_not_waited_for() -> None:
    body = Parallel(
        Node("left", ["x"], [Edge("x", "left"), Edge("room", "right", when=even)]),
        Node("right", ["x", "room"], [Edge("x", "right")], optional=["room"]),
    )
    run = begin(Loop("steps", body, 3), x=0)
    ready: list[list[str]] = []
    while firings := run.take_ready():
        ready.append([f"{one.node} {sorted(one.inputs)}" for one in firings])
        for firing in firings:
            run.complete(firing, dict.fromkeys(run.walk.nodes[firing.node].outputs, 0))
    assert ready == [
        ["left ['x']"],
        ["right ['room', 'x']"],
        ["left ['x']", "right ['x']"],
        ["left ['x']"],
        ["right ['room', 'x']"],
    ]
