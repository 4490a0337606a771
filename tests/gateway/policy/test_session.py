"""openpi's protocol at `/`: a client restated from openpi, a gateway on a socket, a scripted worker."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import httpx
import msgpack
import numpy as np
import pytest
from safetensors.numpy import load
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from shared.events import Failure
from tests.gateway.policy.openpi_client import PolicyClient, pack, unpacked
from tests.gateway.world import SERVED, Performance, World, deployment, listening

pytestmark = pytest.mark.processes

POLICY: Final = replace(SERVED, modalities=("text", "image", "tensor"), outputs=("action",))
STATE: Final = np.array([0.5, -1.0, 2.0])
OBSERVATION: Final = {
    "observation/image": np.arange(48, dtype=np.uint8).reshape(4, 4, 3),
    "observation/state": STATE,
    "prompt": "fold",
}
KEY: Final = ApiKey(name="robot", secret="sesame")


async def act(performance: Performance) -> None:
    """Answer with the state, once for each word of the instruction."""
    world = WORLDS[-1]
    [file] = performance.event.inputs.files
    async with aclosing(world.media.read(file.digest, tenant=performance.event.tenant)) as pieces:
        data = b"".join([piece async for piece in pieces])
    assert hashlib.sha256(data).hexdigest() == file.digest
    words = (performance.event.inputs.text or "").split()
    if "fail" in words:
        performance.fail(Failure(code="unknown_observation", message="no camera", status=400))
        return
    if "wait" in words:
        await performance.cancelled.wait()
        return
    actions = np.tile(load(data)["observation/state"].astype(np.float32), (len(words), 1))
    performance.value("action", actions.tobytes(), {"dtype": "float32", "shape": list(actions.shape)})
    performance.finish()


WORLDS: list[World] = []


async def talk(client: Callable[[str], Any], keys: tuple[ApiKey, ...] = (), **settings: Any) -> Any:
    """Run a client in a thread beside a gateway; return what it returns."""
    async with deployment(act, served=POLICY, settings=GatewaySettings(**settings)) as world:
        WORLDS.append(world)
        async with listening(world, keys) as url:
            return await asyncio.to_thread(client, url)


async def test_a_robot_gets_metadata_and_then_actions_for_each_observation() -> None:
    def robot(url: str) -> tuple[Any, list[dict[str, Any]]]:
        with PolicyClient(url) as client:
            return client.metadata, [client.infer({**OBSERVATION, "prompt": text}) for text in ("a", "b c")]

    metadata, (first, second) = await talk(robot)
    assert metadata == {"server": "dalsegno", "model": "demo", "family": "decoder_lm"}
    np.testing.assert_array_equal(first["actions"], STATE[None].astype(np.float32))
    np.testing.assert_array_equal(second["actions"], np.tile(STATE, (2, 1)).astype(np.float32))
    assert set(first["server_timing"]) == {"infer_ms"}, "openpi's server tells the total time of the last one"
    assert set(second["server_timing"]) == {"infer_ms", "prev_total_ms"}
    assert second["policy_timing"]["infer_ms"] > 0
    assert first["request_id"] != second["request_id"]


async def test_an_error_is_a_text_and_the_connection_stays() -> None:
    def robot(url: str) -> list[Any]:
        found: list[Any] = []
        with PolicyClient(url) as client:
            for observation in ({**OBSERVATION, "prompt": "fail"}, {"prompt": 7}, OBSERVATION):
                try:
                    found.append(client.infer(observation)["actions"].shape)
                except RuntimeError as error:
                    found.append(json.loads(str(error).partition("\n")[2])["error"]["code"])
        return found

    assert await talk(robot) == ["unknown_observation", "invalid_observation", (1, 3)]


async def test_a_text_frame_is_no_observation() -> None:
    def robot(url: str) -> Any:
        with PolicyClient(url) as client:
            client.connection.send("hello")
            return json.loads(client.connection.recv())["error"]["code"]

    assert await talk(robot) == "invalid_observation"


async def test_a_robot_that_leaves_cancels_its_request() -> None:
    async with deployment(act, served=POLICY) as world:
        WORLDS.append(world)
        async with listening(world) as url:
            client = await asyncio.to_thread(PolicyClient, url)
            client.connection.send(pack({**OBSERVATION, "prompt": "wait"}))
            performance = await world.performance()
            await asyncio.to_thread(client.connection.close)
            async with asyncio.timeout(10):
                await performance.cancelled.wait()


async def test_robots_send_their_key_as_openpi_does() -> None:
    def robot(url: str) -> list[Any]:
        found: list[Any] = []
        for key in ("sesame", "wrong", None):
            try:
                with PolicyClient(url, key) as client:
                    found.append(client.infer(OBSERVATION)["actions"].shape)
            except InvalidStatus as refused:
                found.append(refused.response.status_code)
        return found

    assert await talk(robot, (KEY,)) == [(1, 3), 401, 401]


async def test_pages_of_other_origins_get_no_connection() -> None:
    def page(url: str) -> int:
        address, origin = url.replace("http", "ws"), Origin("https://evil.example")
        with pytest.raises(InvalidStatus) as refused, connect(address, origin=origin):
            pass
        return int(refused.value.response.status_code)

    assert await talk(page) == 403


async def test_observations_count_for_the_rate_limit() -> None:
    def robot(url: str) -> list[str]:
        found = []
        with PolicyClient(url) as client:
            for _ in range(3):
                try:
                    client.infer(OBSERVATION)
                    found.append("ok")
                except RuntimeError as error:
                    found.append(json.loads(str(error).partition("\n")[2])["error"]["code"])
        return found

    assert await talk(robot, requests_per_minute=3) == ["ok", "ok", "rate_limit_exceeded"]


async def test_a_message_above_the_limit_of_bodies_closes_the_connection() -> None:
    def robot(url: str) -> int:
        with PolicyClient(url) as client, pytest.raises(ConnectionClosed) as closed:
            client.infer({"observation/image": np.zeros((64, 64, 3), np.uint8)})
        assert closed.value.rcvd is not None
        return int(closed.value.rcvd.code)

    assert await talk(robot, max_body_bytes=4096) == 1009


async def test_the_same_is_served_over_http() -> None:
    def client(url: str) -> list[Any]:
        about = httpx.get(f"{url}/policy")
        answer = httpx.post(f"{url}/policy", content=pack(OBSERVATION))
        wrong = httpx.post(f"{url}/policy", content=b"{}")
        home = httpx.get(f"{url}/", headers={"connection": "upgrade", "upgrade": "h2c"})
        actions = msgpack.unpackb(answer.content, object_hook=unpacked)["actions"]
        return [msgpack.unpackb(about.content)["model"], actions.shape, wrong.status_code, home.status_code]

    assert await talk(client) == ["demo", (1, 3), 400, 200]


async def test_a_model_without_actions_takes_no_websocket() -> None:
    async with deployment() as world, listening(world) as url:
        with pytest.raises(InvalidStatus):
            await asyncio.to_thread(PolicyClient, url)
        assert (await world.client.get("/policy")).status_code == 404


async def test_a_gateway_that_stops_says_so_to_its_robots() -> None:
    async with deployment(act, served=POLICY) as world:
        async with listening(world) as url:
            client = await asyncio.to_thread(PolicyClient, url)
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.to_thread(client.connection.recv)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
