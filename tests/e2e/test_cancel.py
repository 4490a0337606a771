"""A client that disconnects stops the work soon: in the log and in the engine."""

import json

from shared.events import RequestCancel, RequestCancelled, WalkStopped
from tests.e2e import clients
from tests.e2e.deploy import Running

AT_MOST_STEPS = 2


async def test_a_client_that_disconnects_stops_the_engine_within_two_steps(
    random_deployment: Running,
) -> None:
    running, request_id = random_deployment, "leaves"
    body = clients.body("Tell me everything.", request_id, max_tokens=400, ignore_eos=True, temperature=0)
    async with clients.reader(running) as reader:
        async with clients.http(running) as http, http.stream("POST", "/generate", json=body) as response:
            first = json.loads(await anext(response.aiter_lines()))
            assert first["metadata"]["index"] == 0
        _, stopped = await reader.until(reader.subjects.done(0, request_id), WalkStopped)
        _, cancelled = await reader.until(reader.subjects.walk(request_id), RequestCancelled)
        beat = await reader.said(reader.subjects.heartbeat("worker", "0"), lambda beat: beat["running"] == 0)
        events = await reader.events(request_id)
    assert stopped.steps_after <= AT_MOST_STEPS
    assert 0 < stopped.tokens < 400  # it was in the middle
    assert "disconnected" in cancelled.reason
    assert [type(event) for event in events].count(RequestCancel) == 1
    assert (beat["waiting"], beat["kv_used"]) == (0, 0)
    assert clients.run_on(running, "replay", request_id).returncode == 0
