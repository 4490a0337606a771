"""Adapters at run time: what a gateway stores of them, and what it knows of other gateways' changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.requests import log_follower
from gateway.served_adapters import ServedAdapters
from shared.adapters import Adapter
from shared.events import AdapterLoaded, AdapterUnloaded, Event, encode
from tests.gateway.world import SERVED, World, deployment
from tests.tiny import tiny_checkpoint
from tests.tiny.adapters import make_adapter

OTHER = Adapter(name="sql", digest="11", folder="/elsewhere")


@pytest.fixture(scope="module")
def sql(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "sql", tiny_checkpoint("qwen3"), seed=1)


def serving() -> Any:
    """A gateway that takes adapters; each has its own."""
    return deployment(served=replace(SERVED, adapters=ServedAdapters(takes_others=True)))


async def load(world: World, adapter: Adapter, **more: Any) -> httpx.Response:
    body = {"lora_name": adapter.name, "lora_path": adapter.folder, **more}
    return await world.client.post("/v1/load_lora_adapter", json=body)


def elsewhere(world: World, event: Event) -> None:
    """Another gateway stores an event."""
    world.server.append(world.subjects.adapter("sql"), encode(event))


async def models(world: World) -> list[str]:
    return [one["id"] for one in (await world.client.get("/v1/models")).json()["data"]]


async def test_an_adapter_is_in_the_log_before_the_route_answers(sql: Adapter) -> None:
    async with serving() as world:
        assert (await load(world, sql)).status_code == 200
        [event] = world.events("adapter")
        assert isinstance(event, AdapterLoaded)
        assert event.adapter == sql
        assert await models(world) == ["demo", "demo:sql"]
        again = await load(world, sql)
        assert again.status_code == 200


async def test_changes_of_another_gateway_are_followed_and_not_overwritten(sql: Adapter) -> None:
    async with serving() as world:
        elsewhere(world, AdapterLoaded(writer="g-2", adapter=OTHER))
        refused = await load(world, sql)  # it was not read yet, or it was
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_conflict")
        served = world.gateway.served.adapters
        await world.until(lambda: served.by_name == {"sql": OTHER})
        assert "load_inplace" in (await load(world, sql)).json()["error"]["message"]
        assert (await load(world, sql, load_inplace=True)).status_code == 200
        assert served.by_name == {"sql": sql}
        elsewhere(world, AdapterUnloaded(writer="g-2", name="sql"))
        await world.until(lambda: not served.by_name)
        assert await models(world) == ["demo"]


async def test_loaded_adapters_are_stored_again_and_unloaded_ones_are_not(
    sql: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follower, "REPEAT_ADAPTERS_S", 0.001)
    async with serving() as world:
        await load(world, sql)
        await world.until(lambda: len(world.events("adapter")) > 2)
        kinds = {type(event) for event in world.events("adapter")}
        assert kinds == {AdapterLoaded}
        served = world.gateway.served.adapters
        elsewhere(world, AdapterUnloaded(writer="g-2", name="sql"))
        await world.until(lambda: not served.by_name)
        stored = len(world.events("adapter"))
        await load(world, Adapter(name="other", digest=sql.digest, folder=sql.folder))
        await world.until(lambda: len(world.events("adapter")) > stored + 2)
        news = [one for one in world.events("adapter")[stored:] if isinstance(one, AdapterLoaded)]
        assert {one.adapter.name for one in news} == {"other"}


async def test_without_the_key_nothing_is_loaded(sql: Adapter, tmp_path: Path) -> None:
    async with deployment() as world:
        for route in ("load", "unload"):
            body = {"lora_name": "sql"} | ({"lora_path": sql.folder} if route == "load" else {})
            refused = await world.client.post(f"/v1/{route}_lora_adapter", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "adapters_fixed")
        assert world.events("adapter") == []


def test_a_late_event_changes_nothing() -> None:
    served = ServedAdapters(takes_others=True)
    served.fold(AdapterLoaded(adapter=OTHER), 5)
    served.fold(AdapterUnloaded(name="sql"), 7)
    served.fold(AdapterLoaded(adapter=OTHER), 5)
    assert served.by_name == {}
