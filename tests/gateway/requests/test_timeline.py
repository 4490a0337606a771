"""`/v1/requests/{id}/timeline`: when and where a request was computed, and nothing of what it says."""

import json

import pytest

from gateway.requests import timeline
from shared.events import (
    AnyEvent,
    Failure,
    NodeReady,
    NodeWork,
    OutputChunk,
    RequestCancel,
    RequestFailed,
    RequestSubmitted,
    WalkCall,
    WalkCompleted,
    WalkResult,
    encode,
)
from shared.events import Inputs as RequestInputs
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER
from tests.admissions import admitted
from tests.gateway.world import CHAT, Performance, deployment, echo

SECRET = "what nobody else may read"
S = 1_000_000_000


async def test_the_timeline_of_a_request_has_its_steps_and_none_of_its_words() -> None:
    async def script(performance: Performance) -> None:
        performance.walk(admitted(performance.request_id))
        performance.is_admitted = True
        order = NodeReady(
            writer=CONDUCTOR_WRITER,
            request_id=performance.request_id,
            epoch=1,
            attempt=1,
            index=0,
            rank=0,
            model="demo",
            walks=[WalkCall(name="generate", args={"prompt": SECRET})],
            placement={"llm": 0, "vocoder": 1},
            origin="g-test",
            seed=1,
            reason="x",
            history=b"",
        )
        done = WalkCompleted(
            writer="w0",
            request_id=performance.request_id,
            epoch=1,
            attempt=1,
            index=0,
            rank=0,
            results=[WalkResult(name="generate", facts={"text": SECRET})],
            work={"llm": NodeWork(calls=1, took_s=0.5, waited_s=0.25)},
        )
        subjects = performance.subjects
        performance.server.append(subjects.ready(0, performance.request_id), encode(order))
        performance.say(SECRET)
        performance.say(SECRET)
        performance.server.append(subjects.done(0, performance.request_id), encode(done))
        performance.finish()

    async with deployment(script) as world:
        body = CHAT | {"request_id": "r1", "messages": [{"role": "user", "content": SECRET}]}
        answer = await world.client.post("/v1/chat/completions", json=body)
        response = await world.client.get("/v1/requests/r1/timeline")
        missing = await world.client.get("/v1/requests/r2/timeline")

    assert answer.status_code == 200
    assert SECRET not in response.text
    found = response.json()
    assert (found["object"], found["id"], found["left_out"]) == ("request.timeline", "r1", 0)
    assert [one["type"] for one in found["events"]] == [
        "request.submitted", "request.admitted", "node.ready", "walk.completed", "request.finished",
    ]  # fmt: skip
    order, done = found["events"][2:4]
    assert (order["rank"], order["step"], order["nodes"], order["walks"]) == (0, 0, ["llm"], ["generate"])
    assert (done["rank"], done["step"], done["attempt"]) == (0, 0, 1)
    assert done["work"] == {"llm": {"took_s": 0.5, "waited_s": 0.25}}
    times = [one["time"] for one in found["events"]]
    assert times == sorted(times)
    assert found["chunks"]["count"] == 2
    assert times[0] <= found["chunks"]["first"] <= found["chunks"]["last"] <= times[-1]
    assert missing.status_code == 404


async def test_of_a_failure_the_timeline_has_the_code() -> None:
    async def script(performance: Performance) -> None:
        performance.fail(Failure(code="worker_crashed", message=SECRET, status=500))

    async with deployment(script) as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": "r1"})
        response = await world.client.get("/v1/requests/r1/timeline")

    assert response.json()["events"][-1]["code"] == "worker_crashed"
    assert SECRET not in response.text


async def test_of_a_list_of_prompts_each_part_has_its_own_timeline() -> None:
    async with deployment(echo) as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": "r1", "n": 2})
        found = [
            (await world.client.get(f"/v1/requests/{name}/timeline")).json()["chunks"]["count"]
            for name in ("r1", "r1-1")
        ]

    assert found == [4, 4]


def test_a_long_timeline_is_cut_and_advice_is_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_EVENTS", 2)
    folded = timeline.Timeline()
    events: list[tuple[str, AnyEvent]] = [
        ("request", RequestSubmitted(model="m", inputs=RequestInputs(text=SECRET))),
        ("output", OutputChunk(writer="w0", advisory=True)),
        ("edge", RequestCancel()),
        ("control", RequestCancel(reason=SECRET)),
        ("walk", RequestFailed(failure=Failure(code="c", message=SECRET), history=b"")),
        ("output", OutputChunk(writer="w0", text=SECRET)),
    ]
    for seq, (kind, event) in enumerate(events, 1):
        folded.fold(kind, StoredRecord(seq, "s", b"", seq * S), event)
    folded.fold("walk", StoredRecord(9, "s", b"", 9 * S), None)
    document = folded.document("r1")

    assert [one["type"] for one in document["events"]] == ["request.submitted", "request.cancel"]
    assert document["left_out"] == 1
    assert document["chunks"] == {"count": 1, "first": 6.0, "last": 6.0}
    assert SECRET not in json.dumps(document)
