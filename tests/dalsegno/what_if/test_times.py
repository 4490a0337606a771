"""Times under another configuration, held against logs of a worker whose costs are known."""

from functools import cache
from typing import Any

import msgspec
import pytest

from conductor.core.schedule import Deployment
from configs.deployment import DeploymentConfig
from dalsegno.config import resolve
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.what_if import recorded_load, time_report, times
from dalsegno.what_if.recorded_load import Load, Tokens
from dalsegno.what_if.times import Around, NotCalibratedError, Side, Times
from models import registry
from shared.quantile import quantile
from tests.conductor import script
from tests.conductor.script import SUBJECTS
from tests.dalsegno.what_if.served import COST, Asks, Served, traffic
from workers.settings import EngineSettings

AROUND = Around(subjects=SUBJECTS, graph_of=registry.graph)
LIMITS = msgspec.structs.replace(script.LIMITS, max_seq_len=512, kv_tokens=2048, default_max_tokens=64)


def deployment(**changes: Any) -> Deployment:
    return script.deployment(limits=LIMITS, **{"max_concurrent_requests": 64} | changes)


@cache
def config() -> DeploymentConfig:
    found = resolve.effective("demo", (), with_weights=False).config
    return msgspec.structs.replace(found, max_seq_len=512, kv_tokens=None)


def side(max_sequences: int = 4, **changes: Any) -> Side:
    kwargs = {"max_sequences": max_sequences}
    return Side(
        config=msgspec.structs.replace(config(), model_kwargs=kwargs), deployment=deployment(**changes)
    )


@cache
def served(max_sequences: int = 4, places: int = 64, count: int = 40) -> Served:
    asks = traffic(count, per_s=6.0)
    return Served(
        asks, deployment(max_concurrent_requests=places), EngineSettings(max_sequences=max_sequences)
    )


def load_of(one: Served) -> Load:
    records = [record for record in one.records if for_conductor(record.subject, SUBJECTS)]
    recorded = index(records, SUBJECTS, registry.graph)
    return recorded_load.read(one.records, recorded, subjects=SUBJECTS, graph_of=registry.graph)


def predict(one: Served, other: Side, seeds: int = 1) -> Times:
    load = load_of(one)
    return times.predict(load, load.requests, side(), other, AROUND, seeds=seeds)


def test_the_recorded_run_is_simulated_as_it_was() -> None:
    found = predict(served(), side())
    assert max(one.error or 0 for one in found.calibration.values()) < 0.05
    assert found.outcomes == {"recorded": {"finished": 40}, "simulated": {"finished": 40}}


def test_the_costs_are_those_of_the_worker() -> None:
    cost = predict(served(), side()).costs["llm"]
    assert cost["step_s"] + 4 * cost["row_s"] == pytest.approx(COST.of(4, 0), rel=0.15)


@pytest.mark.parametrize("max_sequences", [2, 8])
def test_another_number_of_sequences_takes_as_long_as_it_then_does(max_sequences: int) -> None:
    truth = quantile(served(max_sequences).latencies, 0.5)
    found = predict(served(), side(max_sequences)).predicted["latency p50, s"]
    assert found.value == pytest.approx(truth, rel=0.15)


def test_fewer_places_take_as_long_as_they_then_do() -> None:
    truth = quantile(served(places=2).latencies, 0.5)
    found = predict(served(), side(max_concurrent_requests=2)).predicted["latency p50, s"]
    assert found.value == pytest.approx(truth, rel=0.15)


def test_a_full_queue_refuses_in_the_simulation_too() -> None:
    found = predict(served(), side(max_concurrent_requests=1, max_waiting=2))
    assert found.outcomes["simulated"]["rejected"] > 0
    assert "outcomes: 40 finished recorded" in "\n".join(time_report.lines(found, 40, ["x=1"]))


def test_seeds_give_an_interval_around_the_value() -> None:
    found = predict(served(), side(8), seeds=4).predicted["latency p90, s"]
    assert found.low is not None
    assert found.high is not None
    assert found.value is not None
    assert found.low <= found.value <= found.high
    assert found.low < found.high


def test_a_second_simulation_gives_the_same() -> None:
    assert predict(served(), side(8), seeds=2) == predict(served(), side(8), seeds=2)


def test_a_log_without_work_is_refused() -> None:
    old = Served(traffic(6), deployment(), EngineSettings(max_sequences=4), has_work=False)
    with pytest.raises(NotCalibratedError, match="has no `work`"):
        predict(old, side())


def test_too_few_sequences_are_refused() -> None:
    short = Served(traffic(2), deployment(), EngineSettings(max_sequences=4))
    with pytest.raises(NotCalibratedError, match="too few sequences of llm"):
        predict(short, side())


def test_a_simulation_that_is_far_off_is_refused_with_its_error() -> None:
    one = served()
    load = load_of(one)
    for asked in load.requests:
        asked.end_ns += 3_000_000_000  # something that no simulation knows of took three seconds
    with pytest.raises(NotCalibratedError, match="is wrong by") as refused:
        times.predict(load, load.requests, side(), side(), AROUND, seeds=1)
    assert (refused.value.calibration["latency p50, s"].error or 0) > times.LIMIT


def test_drafted_tokens_are_not_simulated() -> None:
    drafting = Side(
        config=msgspec.structs.replace(config(), model_kwargs={"speculative_tokens": 2}),
        deployment=deployment(),
    )
    with pytest.raises(NotCalibratedError, match="speculative_tokens"):
        predict(served(), drafting)


def test_accepted_drafts_take_no_steps() -> None:
    assert Tokens(prompt=[1], generated=10, drafted=4).steps == 6
    assert Tokens(prompt=[1], generated=10, drafted=10).steps == 1
    assert Tokens(prompt=[1], generated=0).steps == 0


def test_a_cancelled_request_is_cancelled_again() -> None:
    asks = [*traffic(40, per_s=6.0), Asks(9.0, 5, 60)]
    one = Served(asks, deployment(), EngineSettings(max_sequences=4))
    load = load_of(one)
    last = next(asked for asked in load.requests if asked.id == "r40")
    last.cancel_after_s, last.outcome = 0.05, "cancelled"
    found = times.predict(load, load.requests, side(), side(), AROUND, seeds=1)
    assert found.outcomes["simulated"] == {"finished": 40, "cancelled": 1}


def test_a_request_that_was_refused_gets_the_work_of_another() -> None:
    asks = traffic(30, per_s=30.0)
    one = Served(asks, deployment(max_concurrent_requests=4, max_waiting=20), EngineSettings(max_sequences=4))
    load = load_of(one)
    was = side(max_concurrent_requests=4, max_waiting=20)
    refused = [asked for asked in load.requests if asked.outcome == "rejected"]
    assert refused
    found = times.predict(load, load.requests, was, side(), AROUND, seeds=1)
    assert found.outcomes["simulated"] == {"finished": 30}
    assert any("given that of the nearest one" in note for note in found.notes)


def test_requests_of_another_configuration_and_open_ones_are_left_out() -> None:
    load = load_of(served())
    load.requests[0].config = "another"
    load.requests[1].outcome = "open"
    asked, notes = times.chosen(load, "c", None)
    assert len(asked) == 38
    assert len(notes) == 2
    assert len(times.chosen(load, "c", 5)[0]) == 5


def test_the_recorded_load_has_hops_parts_and_lanes() -> None:
    load = load_of(served())
    first = load.requests[0]
    assert set(first.hops) == {"r0.admitted", "r0.ready.1.0.0", "r0.ready.1.1.0", "r0.end"}
    assert first.parts[0][0].others == {"prepare": pytest.approx(0.004)}
    assert first.parts[1][0].sequences["llm"].generated == first.tokens
    assert load.lanes[0, "prepare"] >= 1
    assert load.joins[0].kv_tokens == 2048
