"""Simulated nodes: the real scheduler, and durations of the cost model."""

from functools import partial
from typing import Any

import pytest

from dalsegno.what_if.cost_model import StepCost
from dalsegno.what_if.engines import EngineSize, SimulatedEngine, SimulatedNode
from dalsegno.what_if.recorded_load import Tokens
from dalsegno.what_if.timeline import Timeline
from shared.errors import ClientError
from workers.settings import EngineSettings

COST = StepCost(step_s=0.010, row_s=0.002, token_s=0.001)


class Run:
    """An engine, and what happens when."""

    def __init__(self, *, kv_tokens: int = 1024, **settings: Any) -> None:
        self.timeline = Timeline()
        size = EngineSize(
            settings=EngineSettings(**settings),
            device="cpu",
            kv_tokens=kv_tokens,
            max_positions=512,
        )
        self.engine = SimulatedEngine(self.timeline, size, COST)
        self.firsts: dict[str, float] = {}
        self.ends: dict[str, float] = {}

    def add(self, key: str, prompt: list[int], generated: int) -> None:
        self.engine.add(
            key,
            Tokens(prompt=prompt, generated=generated),
            on_first=partial(self._note, self.firsts, key),
            on_end=partial(self._note, self.ends, key),
        )

    def _note(self, where: dict[str, float], key: str) -> None:
        where[key] = self.timeline.now_s


def test_a_sequence_alone_takes_its_prompt_and_a_step_per_token() -> None:
    run = Run()
    run.add("a", list(range(10)), 5)
    run.timeline.run()
    assert run.firsts["a"] == pytest.approx(0.012 + 10 * 0.001)
    assert run.ends["a"] == pytest.approx(run.firsts["a"] + 4 * 0.012)
    assert run.engine.steps == 5


def test_with_one_place_the_second_sequence_waits_for_the_first() -> None:
    run = Run(max_sequences=1)
    run.add("a", [1, 2], 5)
    run.add("b", [3, 4], 5)
    run.timeline.run()
    assert run.firsts["b"] > run.ends["a"]


def test_with_two_places_they_share_steps() -> None:
    run = Run(max_sequences=2)
    run.add("a", [1, 2], 5)
    run.add("b", [3, 4], 5)
    run.timeline.run()
    assert run.firsts["b"] < run.ends["a"]
    assert run.engine.rows > run.engine.steps


def test_a_cached_prefix_is_not_computed_again() -> None:
    prompt = list(range(64))
    times = []
    for cached in (True, False):
        run = Run(prefix_cache=cached, block_size=16)
        run.add("a", prompt, 1)
        run.timeline.run()
        begun_s = run.timeline.now_s
        run.add("b", prompt, 1)
        run.timeline.run()
        times.append(run.firsts["b"] - begun_s)
    with_cache, without = times
    assert with_cache == pytest.approx(0.012 + 16 * 0.001)
    assert without == pytest.approx(0.012 + 64 * 0.001)


def test_too_small_a_cache_preempts() -> None:
    run = Run(kv_tokens=80, block_size=16, prefix_cache=False)
    run.add("a", list(range(20)), 40)
    run.add("b", list(range(20)), 40)
    run.timeline.run()
    assert run.engine.preemptions > 0
    assert set(run.ends) == {"a", "b"}


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ClientError, match="KV cache"):
        Run(kv_tokens=32).add("a", list(range(40)), 1)


def test_a_removed_sequence_ends_no_more() -> None:
    run = Run()
    remove = run.engine.add(
        "a",
        Tokens(prompt=[1], generated=50),
        on_first=lambda: None,
        on_end=lambda: pytest.fail("it was removed"),
    )
    run.timeline.at(0.1, remove)
    run.add("b", [2], 5)
    run.timeline.run()
    assert "b" in run.ends
    assert run.engine.steps < 50


def test_a_prompt_without_an_answer_ends_with_its_prompt() -> None:
    run = Run()
    run.add("a", list(range(10)), 0)
    run.timeline.run()
    assert run.ends["a"] == pytest.approx(0.012 + 10 * 0.001)
    assert run.firsts == {}


def test_a_node_runs_as_many_calls_at_once_as_it_has_lanes() -> None:
    timeline, ends = Timeline(), list[float]()
    node = SimulatedNode(timeline, 2)
    for _ in range(4):
        node.call(1.0, lambda: ends.append(timeline.now_s))
    timeline.run()
    assert ends == [1.0, 1.0, 2.0, 2.0]
