import pytest

from gateway.meters.answers import WINDOW, Meter
from gateway.meters.hops import HopMeters
from shared.events import (
    AnyEvent,
    Limits,
    OutputChunk,
    OutputTotals,
    Pins,
    RequestAdmitted,
    RequestFinished,
    Usage,
)
from shared.log.port import StoredRecord
from shared.telemetry.histogram import Histogram

ROUTE = "/generate"
ADMITTED = RequestAdmitted(
    family="decoder_lm",
    seed=1,
    placement={},
    limits=Limits(max_seq_len=8, kv_tokens=8, default_max_tokens=8),
    pins=Pins(graph="", plan="", config="", core="", submission=""),
    reason="",
)
FINISHED = RequestFinished(usage=Usage(), finish_reasons=[], output=OutputTotals(), history=b"")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def found(histogram: Histogram) -> dict[float, int]:
    """The observations, by the upper bound of their bucket."""
    bounds = (*histogram.bounds, float("inf"))
    return {bound: count for bound, count in zip(bounds, histogram.counts, strict=True) if count}


class TestMeter:
    def test_an_answer_is_timed_from_its_beginning_to_its_first_token_and_to_its_end(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        answer = meter.begin(ROUTE, "demo")
        clock.now_s += 0.2
        answer.chunk(1)
        clock.now_s += 0.7
        answer.chunk(1)
        answer.end("finished", Usage(prompt_tokens=17, completion_tokens=2))

        latency = meter.latency[ROUTE]
        assert found(latency.first_token_s) == {0.25: 1}
        assert found(latency.request_s) == {1.0: 1}
        assert latency.request_s.sum == pytest.approx(0.9)
        assert meter.outcomes == {(ROUTE, "finished"): 1}
        assert (meter.prompt_tokens, meter.generated_tokens) == (17, 2)
        [(took_s, tokens)] = meter.recent
        assert took_s == pytest.approx(0.9)
        assert tokens == 2

    def test_tokens_of_one_chunk_share_the_time_since_the_one_before(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        answer = meter.begin(ROUTE, "demo")
        answer.chunk(3)
        clock.now_s += 0.08
        answer.chunk(4)

        between = meter.latency[ROUTE].inter_token_s
        assert found(between) == {0.025: 4}
        assert between.sum == pytest.approx(0.08)

    def test_choices_wait_for_themselves_and_not_for_one_another(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        answer = meter.begin(ROUTE, "demo")
        for _ in range(3):
            answer.chunk(1, choice=0)
            clock.now_s += 0.02
            answer.chunk(1, choice=1)
            clock.now_s += 0.02

        between = meter.latency[ROUTE].inter_token_s
        assert found(between) == {0.05: 4}
        assert meter.latency[ROUTE].first_token_s.count == 1

    def test_a_chunk_without_tokens_is_no_first_token(self) -> None:
        meter = Meter(Clock())
        meter.begin(ROUTE, "demo").chunk(0)

        assert meter.latency[ROUTE].first_token_s.count == 0

    def test_an_answer_that_fails_counts_under_its_code_and_tells_nothing_of_latency(self) -> None:
        meter = Meter(Clock())
        answer = meter.begin(ROUTE, "demo")
        answer.chunk(2)
        answer.end("worker_lost")

        assert meter.outcomes == {(ROUTE, "worker_lost"): 1}
        assert meter.latency[ROUTE].request_s.count == 0
        assert meter.generated_tokens == 2
        assert not meter.recent

    def test_an_answer_ends_once(self) -> None:
        meter = Meter(Clock())
        answer = meter.begin(ROUTE, "demo")
        answer.end("finished", Usage(prompt_tokens=1))
        answer.end("client_left", Usage(prompt_tokens=1))

        assert meter.outcomes == {(ROUTE, "finished"): 1}
        assert meter.prompt_tokens == 1

    def test_averages_are_over_the_last_answers_alone(self) -> None:
        meter = Meter(Clock())
        for _ in range(WINDOW + 3):
            meter.begin(ROUTE, "demo").end("finished")

        assert len(meter.recent) == WINDOW


class TestHops:
    def journey(self, *steps: tuple[float, AnyEvent]) -> HopMeters:
        clock = Clock()
        hops = HopMeters(clock)
        journey = hops.submit()
        for took_s, event in steps:
            clock.now_s += took_s
            hops.observe(journey, event)
        return hops

    def test_each_hop_is_timed_from_the_one_before(self) -> None:
        chunk = OutputChunk()
        hops = self.journey((0.2, ADMITTED), (0.04, chunk), (1.0, chunk), (0.3, chunk), (0.009, FINISHED))

        assert {hop: found(took_s) for hop, took_s in hops.took_s.items()} == {
            "admitted": {0.25: 1},
            "first_chunk": {0.05: 1},
            "finished": {0.01: 1},
        }

    def test_a_second_copy_of_an_admission_counts_nothing(self) -> None:
        hops = self.journey((0.2, ADMITTED), (0.2, ADMITTED))

        assert hops.took_s["admitted"].count == 1

    def test_a_record_is_delivered_when_it_is_read_and_never_before_it_was_stored(self) -> None:
        hops = HopMeters(wall_ns=lambda: 5_000_000_000)
        hops.delivered(StoredRecord(1, "s", b"", 4_900_000_000))
        hops.delivered(StoredRecord(2, "s", b"", 5_100_000_000))  # the log's clock is ahead of ours

        assert found(hops.delivery_s) == {0.0001: 1, 0.1: 1}
