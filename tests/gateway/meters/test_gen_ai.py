import opentelemetry.semconv._incubating.metrics.gen_ai_metrics as conventions
import pytest

from gateway.meters.answers import Meter
from gateway.meters.gen_ai import PROVIDER
from shared.events import Failure, Usage
from tests.gateway.meters.test_answers import Clock, found
from tests.gateway.operations.test_metrics import CHAT_ROUTE, scraped
from tests.gateway.world import CHAT, Performance, deployment

CHATS = ("chat", PROVIDER, "demo")
ROUTE = "/v1/chat/completions"


def test_an_answer_is_counted_by_operation_and_model() -> None:
    clock = Clock()
    meter = Meter(clock)
    answer = meter.begin(ROUTE, "demo")
    clock.now_s += 0.03
    answer.chunk(2)
    for _ in range(2):
        clock.now_s += 0.09
        answer.chunk(1)
    clock.now_s += 0.5
    answer.end("finished", Usage(prompt_tokens=17, completion_tokens=4))

    of = meter.gen_ai
    assert {labels: found(one) for labels, one in of.first_token_s.items()} == {CHATS: {0.04: 1}}
    assert {labels: found(one) for labels, one in of.output_token_s.items()} == {CHATS: {0.1: 1}}
    assert of.output_token_s[CHATS].sum == pytest.approx(0.09)
    assert {labels: found(one) for labels, one in of.request_s.items()} == {(*CHATS, ""): {1.28: 1}}
    assert {labels: found(one) for labels, one in of.tokens.items()} == {
        (*CHATS, "input"): {64.0: 1}, (*CHATS, "output"): {4.0: 1},
    }  # fmt: skip


def test_the_time_of_a_token_is_that_between_tokens_of_one_choice() -> None:
    clock = Clock()
    meter = Meter(clock)
    answer = meter.begin(ROUTE, "demo")
    for _ in range(3):
        answer.chunk(1, choice=0)
        clock.now_s += 0.02
        answer.chunk(1, choice=1)
        clock.now_s += 0.02
    answer.end("finished")

    assert meter.gen_ai.output_token_s[CHATS].count == 1
    assert meter.gen_ai.output_token_s[CHATS].sum == pytest.approx(0.04)


def test_an_answer_that_failed_has_a_duration_with_its_code_and_nothing_else() -> None:
    clock = Clock()
    meter = Meter(clock)
    answer = meter.begin(ROUTE, "demo")
    answer.chunk(1)
    clock.now_s += 0.3
    answer.chunk(1)
    answer.end("worker_lost")

    of = meter.gen_ai
    assert {labels: found(one) for labels, one in of.request_s.items()} == {
        (*CHATS, "worker_lost"): {0.32: 1}
    }
    assert not of.first_token_s
    assert not of.output_token_s
    assert not of.tokens


def test_one_token_has_no_time_between_tokens() -> None:
    meter = Meter(Clock())
    answer = meter.begin(ROUTE, "demo")
    answer.chunk(1)
    answer.end("finished", Usage(prompt_tokens=1, completion_tokens=1))

    assert not meter.gen_ai.output_token_s
    assert meter.gen_ai.first_token_s[CHATS].count == 1


def prometheus_name(metric: str) -> str:
    """A histogram's name by OpenTelemetry's rules for Prometheus; all but one here are in seconds."""
    unit = "" if metric == conventions.GEN_AI_CLIENT_TOKEN_USAGE else "_seconds"
    return metric.replace(".", "_") + unit


@pytest.mark.parametrize(
    ("metric", "label", "bounds"),
    [
        (
            conventions.GEN_AI_SERVER_REQUEST_DURATION,
            "error_type=,",
            (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
        ),
        (
            conventions.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
            "",
            (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
        ),
        (
            conventions.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
            "",
            (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
        ),
        (
            conventions.GEN_AI_CLIENT_TOKEN_USAGE,
            "",
            (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864),
        ),
    ],
)
async def test_histograms_have_the_names_and_the_buckets_of_the_conventions(
    metric: str, label: str, bounds: tuple[float, ...]
) -> None:
    async with deployment() as world:
        await world.client.post(CHAT_ROUTE, json=CHAT)
        page = (await world.client.get("/metrics")).text
        values = await scraped(world.client)

    name = prometheus_name(metric)
    assert f"# TYPE {name} histogram" in page
    kind = ",gen_ai_token_type=output" if metric == conventions.GEN_AI_CLIENT_TOKEN_USAGE else ""
    labels = f"gen_ai_operation_name=chat,gen_ai_provider_name=dalsegno,gen_ai_request_model=demo{kind}"
    assert values[f"{name}_count{{{label}{labels}}}"] == 1
    buckets = {
        float(line.split('le="')[1].split('"')[0])
        for line in page.splitlines()
        if line.startswith(f"{name}_bucket{{")
    }
    assert buckets == {*bounds, float("inf")}


async def test_an_error_is_a_label() -> None:
    async def break_off(performance: Performance) -> None:
        performance.reject(Failure(code="prompt_too_long", message="no", status=400))

    async with deployment(break_off) as world:
        await world.client.post(CHAT_ROUTE, json=CHAT)
        values = await scraped(world.client)

    labels = "gen_ai_operation_name=chat,gen_ai_provider_name=dalsegno,gen_ai_request_model=demo"
    name = "gen_ai_server_request_duration_seconds_count"
    assert values[f"{name}{{error_type=prompt_too_long,{labels}}}"] == 1
