import asyncio
import json
from typing import Any

import httpx
import pytest

from configs.deployment import GatewaySettings
from gateway.requests.relay import BUFFER_BYTES
from shared.events import Failure, RequestCancel, RequestSubmitted
from tests.gateway.openai.test_routes import events
from tests.gateway.requests.test_disconnect import raw
from tests.gateway.world import CHAT, Performance, World, deployment, listening

COMPLETION = {"model": "demo", "prompt": "x"}


async def by_choice(performance: Performance) -> None:
    """Answer with the prompt and the choice, in one token more than the choice's number."""
    event = performance.event
    asked = event.inputs.text if event.inputs.text is not None else str(event.inputs.token_ids or "chat")
    for number in range(event.params.choice + 1):
        performance.say(f"{asked}/{event.params.choice}.{number} ", [number])
        await asyncio.sleep(0)
    performance.finish("length" if event.params.choice else "stop")


def submissions(world: World) -> list[RequestSubmitted]:
    return [event for event in world.events("request") if isinstance(event, RequestSubmitted)]


async def test_n_answers_are_requests_of_their_own_and_the_prompt_counts_once() -> None:
    async with deployment(by_choice) as world:
        body = CHAT | {"n": 3, "seed": 5, "request_id": "mine"}
        response = await world.client.post("/v1/chat/completions", json=body)
        asked = submissions(world)

    answer = response.json()
    assert answer["id"] == response.headers["x-request-id"] == "mine"
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in answer["choices"]] == [
        (0, "chat/0.0 ", "stop"),
        (1, "chat/1.0 chat/1.1 ", "length"),
        (2, "chat/2.0 chat/2.1 chat/2.2 ", "length"),
    ]
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert [event.request_id for event in asked] == ["mine", "mine-1", "mine-2"]
    assert [(event.params.choice, event.params.seed) for event in asked] == [(0, 5), (1, 5), (2, 5)]
    assert {(event.parent, event.parts) for event in asked} == {("mine", 3)}


async def test_a_single_answer_is_the_request_itself() -> None:
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"n": 1, "request_id": "mine"})
        [asked] = submissions(world)

    assert (asked.request_id, asked.parent, asked.parts, asked.params.choice) == ("mine", None, 1, 0)


async def test_choices_are_numbered_by_prompt_and_then_by_choice() -> None:
    async with deployment(by_choice) as world:
        body = COMPLETION | {"prompt": ["a", "b"], "n": 2, "best_of": 2}
        answer = (await world.client.post("/v1/completions", json=body)).json()
        tokens = await world.client.post("/v1/completions", json=COMPLETION | {"prompt": [[1, 2], [3]]})

    assert [(one["index"], one["text"]) for one in answer["choices"]] == [
        (0, "a/0.0 "), (1, "a/1.0 a/1.1 "), (2, "b/0.0 "), (3, "b/1.0 b/1.1 "),
    ]  # fmt: skip
    assert answer["usage"] == {"prompt_tokens": 14, "completion_tokens": 6, "total_tokens": 20}
    assert [one["text"] for one in tokens.json()["choices"]] == ["[1, 2]/0.0 ", "[3]/0.0 "]


async def test_a_stream_of_choices_begins_and_ends_each_of_them() -> None:
    async with deployment(by_choice) as world:
        body = CHAT | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
        response = await world.client.post("/v1/chat/completions", json=body)

    *found, usage, done = events(response)
    assert done == "[DONE]"
    assert isinstance(usage, dict)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    told: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for event in found:
        assert isinstance(event, dict)
        [choice] = event["choices"]
        told[choice["index"]].append(choice)
    for index, choices in told.items():
        first, *middle, last = choices
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in middle).startswith(f"chat/{index}.0")
        assert last["finish_reason"] == ("length" if index else "stop")


async def test_choices_are_told_as_they_come_and_not_one_after_the_other() -> None:
    both = asyncio.Barrier(2)

    async def together(performance: Performance) -> None:
        for number in range(3):
            await both.wait()
            performance.say(str(number))
        performance.finish()

    async with deployment(together) as world:
        response = await world.client.post("/v1/completions", json=COMPLETION | {"n": 2, "stream": True})

    told = [event["choices"][0] for event in events(response) if isinstance(event, dict)]
    texts = [(choice["text"], choice["index"]) for choice in told if choice["text"]]
    assert [text for text, _ in texts] == ["0", "0", "1", "1", "2", "2"]


async def test_when_one_choice_fails_the_answer_does_and_the_others_are_cancelled() -> None:
    async def one_fails(performance: Performance) -> None:
        if performance.event.params.choice == 1:
            performance.fail(Failure(code="worker_failed", message="out of memory", status=500))
        else:
            await performance.cancelled.wait()

    async with deployment(one_fails) as world:
        response = await world.client.post("/v1/chat/completions", json=CHAT | {"n": 3, "request_id": "q"})
        for number in (0, 2):
            await (await world.performance(number)).cancelled.wait()
        cancels = [event for event in world.events("control") if isinstance(event, RequestCancel)]

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "worker_failed"
    assert sorted(event.request_id or "" for event in cancels) == ["q", "q-2"]
    assert {event.reason for event in cancels} == {"another choice of the same answer failed: worker_failed"}


async def test_when_one_choice_is_refused_at_once_the_others_are_cancelled() -> None:
    async def forever(performance: Performance) -> None:
        await performance.cancelled.wait()

    async with deployment(forever) as world:
        async with asyncio.TaskGroup() as tasks:
            strangers = {"text": "another", "request_id": "q-1", "timeout_s": 60}
            asking = tasks.create_task(world.client.post("/generate", json=strangers))
            await world.performance()
            response = await world.client.post(
                "/v1/chat/completions", json=CHAT | {"n": 2, "request_id": "q"}
            )
            await (await world.performance(1)).cancelled.wait()
            asking.cancel()
        cancels = [event for event in world.events("control") if isinstance(event, RequestCancel)]

    assert response.status_code == 409
    assert cancels[0].request_id == "q"


@pytest.mark.processes
async def test_a_client_that_leaves_cancels_all_its_choices() -> None:
    async def begun(performance: Performance) -> None:
        performance.say("begun ")
        await performance.cancelled.wait()

    body = CHAT | {"n": 3, "stream": True, "request_id": "q"}
    async with deployment(begun) as world, listening(world) as url:
        async with raw(url, "/v1/chat/completions", body) as reader:
            await reader.readuntil(b"\r\n\r\n")
            await world.performance(2)
        for number in range(3):
            await (await world.performance(number)).cancelled.wait()
        cancels = [event for event in world.events("control") if isinstance(event, RequestCancel)]

    assert sorted(event.request_id or "" for event in cancels) == ["q", "q-1", "q-2"]


async def test_asking_again_under_the_same_id_gives_the_same_answers_and_executes_nothing() -> None:
    body = CHAT | {"n": 3, "request_id": "q"}
    async with deployment(by_choice) as world:
        first = await world.client.post("/v1/chat/completions", json=body)
        again = await world.client.post("/v1/chat/completions", json=body)
        performed = len(world.performances)

    assert again.json()["choices"] == first.json()["choices"]
    assert again.json()["usage"] == first.json()["usage"]
    assert performed == 3


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"n": 2}, {"n": 4}, {"n": 1}, {"seed": 1}])
async def test_another_number_of_answers_is_another_request(change: dict[str, int]) -> None:
    body = CHAT | {"n": 3, "request_id": "q"}
    async with deployment(by_choice) as world:
        first = await world.client.post("/v1/chat/completions", json=body)
        other = await world.client.post("/v1/chat/completions", json=body | change)

    assert (first.status_code, other.status_code) == (200, 409)
    assert other.json()["error"]["code"] == "request_id_conflict"


@pytest.mark.parametrize(("length", "status"), [(62, 200), (63, 400)])
async def test_an_id_must_leave_room_for_those_of_its_parts(length: int, status: int) -> None:
    async with deployment(by_choice) as world:
        body = CHAT | {"n": 10, "request_id": "x" * length}
        response = await world.client.post("/v1/chat/completions", json=body)
        asked = submissions(world)

    assert response.status_code == status
    assert len(asked) == (10 if status == 200 else 0)
    if status == 400:
        assert "at most 62 for 10 answers" in response.json()["error"]["message"]


async def test_how_many_answers_one_may_ask_for_is_the_deployments() -> None:
    async with deployment(by_choice, settings=GatewaySettings(max_choices=4)) as world:
        allowed = await world.client.post("/v1/completions", json=COMPLETION | {"prompt": ["a", "b"], "n": 2})
        refused = await world.client.post("/v1/completions", json=COMPLETION | {"prompt": ["a"] * 5})

    assert allowed.status_code == 200
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"


@pytest.mark.processes
async def test_a_client_that_does_not_read_is_bounded_however_many_choices_it_asked_for() -> None:
    size, count = 20_000, 600

    async def flood(performance: Performance) -> None:
        for _ in range(count):
            performance.say("z" * size)
            await asyncio.sleep(0)
        performance.finish()

    body = COMPLETION | {"n": 2, "stream": True}
    async with (
        deployment(flood) as world,
        listening(world) as url,
        raw(url, "/v1/completions", body) as reader,
    ):
        await reader.readuntil(b"\r\n\r\n")
        slow = [await world.performance(number) for number in range(2)]
        assert world.gateway.follower.connection is not None
        router = world.gateway.follower.connection.submissions._router
        relays = [relay for relays in router._relays.values() for relay in relays]
        await world.until(lambda: all(one.transcript.next_index == count for one in slow))
        await world.until(lambda: not len(router))
        assert [relay.is_behind for relay in relays] == [True] * 2  # the rest comes from the log
        assert world.gateway.in_flight.count == 1
        received = bytearray()
        while b"[DONE]" not in received[-100:]:
            received += await reader.read(1 << 20)

    assert received.count(b"z") == size * count * 2
    assert size * count > 10 * BUFFER_BYTES


async def test_many_choices_keep_their_texts_apart() -> None:
    async with deployment(by_choice) as world:
        response = await world.client.post("/v1/completions", json=COMPLETION | {"n": 24, "stream": True})

    texts: dict[int, str] = {}
    for event in events(response):
        if isinstance(event, dict):
            [choice] = event["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {
        number: "".join(f"x/{number}.{token} " for token in range(number + 1)) for number in range(24)
    }


async def test_losing_the_log_cancels_nothing() -> None:
    async with deployment(performing=False) as world:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(
                world.client.post("/v1/chat/completions", json=CHAT | {"n": 2, "request_id": "q"})
            )
            await world.stored("request")
            await world.until(lambda: len(submissions(world)) == 2)
            before = world.events("control")
            world.server.recreate()
            await world.regressed.wait()
        response: httpx.Response = asking.result()

    assert response.status_code == 503
    assert json.loads(response.content)["error"]["code"] in ("log_unavailable", "log_regressed")
    assert before == world.events("control") == []
