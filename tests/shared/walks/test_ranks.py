"""One walk on several ranks: each fires its own nodes and receives the others' firings.

In any order of arrival, with duplicates and out of order, all ranks reach the state of a single run.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.walks import (
    CLIENT,
    KEEP,
    NOT_DUE,
    CompiledWalk,
    Cutter,
    Edge,
    Emission,
    Firing,
    Fixed,
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
from tests.shared.walks.drawn import STREAM, produced, walks
from tests.shared.walks.sections import BRANCHES, DIFFUSION, GUIDED, PIPELINE, REFINE, VOICE, even


@dataclass(frozen=True, slots=True)
class Told:
    """A firing as one rank reports it to the others."""

    node: str
    path: tuple[int, ...]
    outputs: Mapping[str, Any]
    stops: tuple[str, ...]


class Rank:
    """A rank that fires the nodes `here`, feeds their streams, and holds firings that are not due."""

    def __init__(self, walk: CompiledWalk, here: set[str] | None, inputs: Mapping[str, Any]) -> None:
        self.run = WalkRun(walk, here=here)
        self.inputs = inputs
        self.has_begun = False
        self.pending: list[Firing] = []
        self.fired: list[tuple[str, tuple[int, ...], str]] = []
        self.emissions: list[Emission] = []
        self.inbox: list[Told] = []
        self.early: list[Told] = []
        self.known = {*inputs.values()}
        self.chunks = {node: self.cut(walk, node) for node in walk.nodes}

    @staticmethod
    def cut(walk: CompiledWalk, node: str) -> list[tuple[str, bool]]:
        """Return the chunks for a node; none after the end if only one loop encloses the node."""
        stops = len(walk.loop_table[walk.nodes[node].loop].lineage) <= 1
        cutter = Cutter(Fixed(2), "stop" if stops else "empty")
        chunks = cutter.cut(3, ended=True)
        if not stops:
            chunks += [cutter.empty() for _ in range(3**5)]  # the most that five loops ask for
        return [(f"{node} {chunk.start}-{chunk.stop}", chunk.last) for chunk in chunks][::-1]

    def begin(self) -> None:
        self.has_begun = True
        self.run.start(self.inputs)
        self.go_on()

    def go_on(self) -> None:
        """Fire all ready nodes, and try held firings again after each change."""
        self.pending += self.run.take_ready()
        while wanted := [(edge, node) for edge, node in self.run.awaited_streams() if self.chunks[node]]:
            for edge, node in wanted:
                value, last = self.chunks[node].pop()
                assert self.run.feed(edge, node, value, last=last)
            self.pending += self.run.take_ready()
        early, self.early = self.early, []
        for told in early:
            self.hear(told)

    def fire(self, firing: Firing, stopped: Mapping[str, int]) -> Told:
        walk = self.run.walk
        node = walk.nodes[firing.node]
        outputs = {edge: produced(node.name, edge, firing.path, firing.inputs) for edge in node.outputs}
        around = [walk.loop_table[index].name for index in walk.loop_table[node.loop].lineage]
        stops = [
            loop
            for loop, iteration in zip(around, firing.path, strict=True)
            if stopped.get(loop) == iteration + 1
        ]
        self.fired.append((firing.node, firing.path, repr(sorted(firing.inputs.items()))))
        emissions = self.run.complete(firing, outputs, stops)
        assert emissions is not None
        assert self.run.complete(firing, outputs, stops) is None  # a duplicate
        self.emissions += emissions
        self.known |= {*outputs.values()}
        self.go_on()
        return Told(firing.node, firing.path, outputs, (*stops, *firing.ends))

    def hear(self, told: Told) -> None:
        heard = self.run.complete_remote(told.node, told.path, told.outputs, told.stops)
        if heard is NOT_DUE:
            self.early.append(told)
        elif heard is not None:
            self.emissions += heard
            self.known |= {*told.outputs.values()}
            self.go_on()

    def dead(self) -> set[str]:
        """Return the values that no rank reads any more, as known to this rank."""
        return self.known - {*self.run.live_values()} if self.has_begun else set()


def alone(walk: CompiledWalk, inputs: Mapping[str, Any], stopped: Mapping[str, int]) -> Rank:
    rank = Rank(walk, None, inputs)
    rank.begin()
    while rank.pending:
        rank.fire(rank.pending.pop(0), stopped)
    return rank


def together(
    walk: CompiledWalk,
    inputs: Mapping[str, Any],
    stopped: Mapping[str, int],
    places: list[set[str]],
    chance: random.Random,
) -> list[Rank]:
    ranks = [Rank(walk, here, inputs) for here in places]
    while True:
        moves: list[tuple[Rank, str]] = [(rank, "begin") for rank in ranks if not rank.has_begun]
        moves += [(rank, "fire") for rank in ranks if rank.pending]
        moves += [(rank, "hear") for rank in ranks if rank.inbox]
        if not moves:
            return ranks
        rank, move = chance.choice(moves)
        if move == "begin":
            rank.begin()
        elif move == "hear":
            rank.hear(rank.inbox.pop(chance.randrange(len(rank.inbox))))
        else:
            firing = rank.pending.pop(chance.randrange(len(rank.pending)))
            read = {*flat([*firing.inputs.values()])}
            assert not any(read & other.dead() for other in ranks), "freed while it was read"
            told = rank.fire(firing, stopped)
            for other in ranks:
                if other is not rank:
                    other.inbox += [told] * chance.choice((1, 1, 2, 3))


def flat(values: list[Any]) -> Iterator[str]:
    for value in values:
        yield from flat(value) if isinstance(value, list) else (value,)


def shown(emissions: list[Emission]) -> Counter[str]:
    return Counter(map(repr, emissions))


@pytest.mark.slow
@settings(max_examples=150)
@given(walks(has_streams=True), st.integers(2, 4), st.integers(0, 2**32))
def test_ranks_that_hear_in_any_order_come_to_what_one_alone_comes_to(
    drawn: tuple[Section, dict[str, int]], count: int, seed: int
) -> None:
    section, stopped = drawn
    walk = compile_walk("walk", section)
    inputs = {name: f"given {name}" for name in walk.consumers}
    expected = alone(walk, inputs, stopped)
    assert expected.run.done

    chance = random.Random(seed)
    places: list[set[str]] = [set() for _ in range(count)]
    for node in walk.nodes:
        chance.choice(places).add(node)
    ranks = together(walk, inputs, stopped, places, chance)

    for rank, here in zip(ranks, places, strict=True):
        assert rank.run.done
        assert rank.early == []
        assert rank.run.outputs == expected.run.outputs
        assert rank.run.accumulated == expected.run.accumulated
        assert shown(rank.emissions) == shown(expected.emissions)
        kept = [*rank.run.outputs.values(), *rank.run.accumulated.values()]
        assert Counter(rank.run.live_values()) == Counter(flat(kept))
        assert {node for node, *_ in rank.fired} <= here
    assert Counter(one for rank in ranks for one in rank.fired) == Counter(expected.fired)


# ---- one by one ------------------------------------------------------------------------------------


def pair(section: Section, first: set[str], **inputs: Any) -> tuple[WalkRun, WalkRun]:
    """One walk on two ranks, the first of which fires the nodes `first`."""
    walk = compile_walk("walk", section)
    runs = WalkRun(walk, here=first), WalkRun(walk, here=set(walk.nodes) - first)
    for run in runs:
        run.start(inputs)
    return runs


def test_a_rank_is_handed_out_its_own_nodes_alone() -> None:
    here, there = pair(PIPELINE, {"encode"}, image="pixels")
    (encode,) = here.take_ready()
    assert there.take_ready() == []
    assert here.complete(encode, {"features": 1}) == []
    assert here.take_ready() == []
    assert there.complete_remote("encode", (), {"features": 1}) == []
    (decode,) = there.take_ready()
    assert decode == Firing("decode", {"features": 1}, ())
    emitted = [Emission("output", CLIENT("text"), 2, "decode", ())]
    assert there.complete(decode, {"output": 2}) == emitted
    assert here.complete_remote("decode", (), {"output": 2}) == emitted  # whose it is, the node says
    assert (here.done, there.done) == (True, True)


def test_a_firing_that_is_not_due_is_early_and_one_that_was_heard_a_duplicate() -> None:
    here, there = pair(DIFFUSION, {"denoiser"}, latents="noise", prompt="a cat")
    tell = []
    for step in range(3):
        (firing,) = here.take_ready()
        here.complete(firing, {"latents": step})
        tell.append((firing.path, {"latents": step}))
    assert there.complete_remote("denoiser", *tell[2]) is NOT_DUE
    assert there.complete_remote("denoiser", *tell[1]) is NOT_DUE
    assert there.complete_remote("denoiser", *tell[0]) == []
    assert there.complete_remote("denoiser", *tell[0]) is None
    assert there.complete_remote("denoiser", *tell[2]) is NOT_DUE
    assert (
        there.complete_remote("denoiser", *tell[1]) == []
    )  # it begins the iteration, without being asked for firings
    assert there.complete_remote("denoiser", *tell[2]) == []
    (decode,) = there.take_ready()
    assert decode.inputs == {"latents": 2}
    assert there.complete_remote("denoiser", *tell[2]) is None


def test_a_firing_is_early_before_the_walk_has_its_inputs() -> None:
    run = WalkRun(compile_walk("walk", PIPELINE), here={"decode"})
    assert run.complete_remote("encode", (), {"features": 1}) is NOT_DUE
    run.start({"image": "pixels"})
    assert run.complete_remote("encode", (), {"features": 1}) == []


def test_a_guarded_walk_hears_of_nothing_before_it_has_its_inputs() -> None:
    body = Sequential(Node("a", [], [Edge("x", "b", even)]), Node("b", ["x", "y"]))
    run = WalkRun(compile_walk("walk", Loop("l", body, 2)), here={"b"})
    assert run.complete_remote("a", (0,), {"x": 1}) is NOT_DUE  # though it takes no inputs
    run.start({"y": 2})
    assert run.complete_remote("a", (0,), {"x": 1}) == []
    assert run.take_ready() == [Firing("b", {"x": 1, "y": 2}, (0,))]


def test_branches_on_several_ranks_meet_where_they_are_combined() -> None:
    walk = compile_walk("walk", GUIDED)
    runs = {name: WalkRun(walk, here={name}) for name in (*BRANCHES, "combine", "vae_decoder")}
    for run in runs.values():
        run.start({"latents": "noise", "time_index": 0})
    fired: Counter[str] = Counter()
    while ready := [(name, firing) for name, run in runs.items() for firing in run.take_ready()]:
        for name, firing in ready:
            outputs = {edge: f"{edge} {firing.path}" for edge in walk.nodes[name].outputs}
            assert runs[name].complete(firing, outputs) is not None
            fired[name] += 1
            for other, run in runs.items():
                if other != name:
                    assert isinstance(run.complete_remote(name, firing.path, outputs), list)
    assert all(run.done for run in runs.values())
    assert fired == {**dict.fromkeys((*BRANCHES, "combine"), 49), "vae_decoder": 1}


def test_a_stop_told_with_a_firing_ends_the_loop_on_every_rank_after_the_same_iteration() -> None:
    here, there = pair(REFINE, {"denoiser"}, latents="noise", prompt="a cat")
    (first,) = here.take_ready()
    here.complete(first, {"latents": "early"}, stops=("denoise",))
    assert there.complete_remote("denoiser", (0, 0), {"latents": "early"}, ("denoise",)) == []
    (refiner,) = there.take_ready()
    assert refiner.inputs == {"latents": "early"}
    there.complete(refiner, {"latents": "again"}, ("refine",))
    assert here.complete_remote("refiner", (0,), {"latents": "again"}, ("refine",)) == []
    assert here.take_ready() == []  # the decoder is there
    assert [firing.node for firing in there.take_ready()] == ["decoder"]


def test_a_loop_kept_inside_an_engine_is_one_firing_on_every_rank() -> None:
    section = Sequential(
        Loop("decode", Node("llm", ["x"], [Edge("x", "llm"), Edge("x", "vocoder")]), 99, ["x"]),
        Node("vocoder", ["x"]),
    )
    here, there = pair(section, {"llm"}, x=0)
    (firing,) = here.take_ready()
    assert here.complete(firing, {"x": "the last"}, ("decode",)) == []
    assert there.complete_remote("llm", firing.path, {"x": "the last"}, ("decode",)) == []
    assert there.take_ready() == [Firing("vocoder", {"x": "the last"}, ())]


def test_a_guard_is_asked_on_every_rank_and_skips_the_same_nodes() -> None:
    section = Loop(
        "l",
        Sequential(
            Node("a", [], [Edge("x", "b", even)]),
            Node("b", ["x"], [Edge("y", "c")]),
            Node("c", ["y"], [Edge("z", KEEP)], optional=["y"]),
        ),
        3,
        accumulated=["z"],
    )
    here, there = pair(section, {"a", "c"})
    seen = []
    for iteration in range(3):
        (a,) = here.take_ready()
        here.complete(a, {"x": 1})
        assert there.complete_remote("a", (iteration,), {"x": 1}) == []
        for b in there.take_ready():
            there.complete(b, {"y": 2})
            assert here.complete_remote("b", b.path, {"y": 2}) == []
        (c,) = here.take_ready()
        seen.append(c.inputs)
        here.complete(c, {"z": iteration})
        assert there.complete_remote("c", (iteration,), {"z": iteration}) is not None
    assert seen == [{"y": 2}, {}, {"y": 2}]
    assert here.accumulated == there.accumulated == {"z": [0, 1, 2]}


# ---- streams ---------------------------------------------------------------------------------------


def test_only_the_rank_that_fires_a_node_waits_for_its_chunks_and_tells_of_the_end() -> None:
    section = Sequential(VOICE, Node("mixer", ["volume"]))
    here, there = pair(section, {"vocoder"}, volume=1)
    assert (here.awaited_streams(), there.awaited_streams()) == ([("token", "vocoder")], [])
    assert not there.feed("token", "vocoder", "chunk")
    for last in (False, True):
        assert here.take_ready() == []  # it begins the iteration
        assert here.feed("token", "vocoder", "chunk", last=last)
        (firing,) = here.take_ready()
        assert firing.ends == (("voice",) if last else ())
        assert here.complete(firing, {"audio": "sound"}) is not None
        assert there.complete_remote("vocoder", firing.path, {"audio": "sound"}, firing.ends) is not None
    (mixer,) = there.take_ready()
    there.complete(mixer, {})
    assert here.complete_remote("mixer", (), {}) == []
    assert (here.done, there.done) == (True, True)


# ---- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            ("unknown", (), {}),
            r"no other rank fires node 'unknown'; the nodes are \['decode', 'encode'\]",
        ),
        (
            ("decode", (), {"output": 1}),
            r"no other rank fires .*, of which \['decode'\] fire here",
        ),
        (
            ("encode", (0,), {"features": 1}),
            r"a path of node 'encode' with the iterations of the loops \[\]",
        ),
        (("encode", (), {"output": 1}), r"node 'encode' must produce \['features'\], found \['output'\]"),
        (
            ("encode", (), {"features": 1}, ("l",)),
            "a firing of node 'encode' cannot stop loop 'l', which does not",
        ),
    ],
)
def test_what_no_other_rank_can_say_is_an_error_and_changes_nothing(told: Any, message: str) -> None:
    _, run = pair(PIPELINE, {"encode"}, image="pixels")
    with pytest.raises(WalkError, match=message):
        run.complete_remote(*told)
    assert run.complete_remote("encode", (), {"features": 1}) == []


def test_a_run_that_fires_everything_hears_of_nothing() -> None:
    run = WalkRun(compile_walk("walk", PIPELINE))
    run.start({"image": "pixels"})
    with pytest.raises(WalkError, match="no other rank fires node 'encode'"):
        run.complete_remote("encode", (), {"features": 1})


def test_a_firing_behind_the_end_means_that_the_ranks_do_not_agree() -> None:
    _, run = pair(Loop("l", Node("n", ["x"]), 2), {"n"}, x=0)
    assert [run.complete_remote("n", (0,), {}), run.complete_remote("n", (1,), {})] == [[], []]
    assert run.complete_remote("n", (1,), {}) is None
    with pytest.raises(WalkError, match=r"node 'n' fired on another rank at \(2,\), but here the walk"):
        run.complete_remote("n", (2,), {})


def test_a_stop_of_a_loop_beside_the_node_is_refused_for_it_has_no_place_in_the_order() -> None:
    section = Parallel(Loop("a", Node("n", ["x"]), 9), Loop("b", Node("m", ["x"]), 9))
    run = WalkRun(compile_walk("walk", section))
    run.start({"x": 0})
    first, _ = run.take_ready()
    with pytest.raises(WalkError, match=r"cannot stop loop 'b', which .* enclosing loops are \['a'\]"):
        run.complete(first, {}, ("b",))
    assert run.complete(first, {}, ("a",)) == []
    assert [firing.node for firing in run.take_ready()] == []


def test_drawn_walks_take_streams() -> None:
    """The property above covers them as well."""
    walk = compile_walk("walk", Loop("l", Node("n", [StreamInput(STREAM)]), 9))
    rank = alone(walk, {}, {})
    assert [inputs for _, _, inputs in rank.fired] == ["[('items', 'n 0-2')]", "[('items', 'n 2-3')]"]
    assert rank.run.done
