"""`/v1/conversations`, and responses that continue one: by OpenAI's schema and SDK."""

import asyncio
from typing import Any

import openai
import pytest

from configs.secrets import ApiKey
from gateway.responses.conversations import store
from shared.events import ConversationChanged, Failure, RequestSubmitted
from tests.gateway.world import Performance, World, deployment, echo, listening

PATH = "/v1/conversations"
RESPONSES = "/v1/responses"


async def begun(world: World, **body: Any) -> str:
    response = await world.client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def said(world: World, conversation: str, text: str, **body: Any) -> dict[str, Any]:
    response = await world.client.post(RESPONSES, json={"input": text, "conversation": conversation, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def items(world: World, conversation: str, **query: Any) -> list[dict[str, Any]]:
    response = await world.client.get(f"{PATH}/{conversation}/items", params={"order": "asc", **query})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in found]


def asked(world: World) -> list[Any]:
    """The messages of all requests."""
    return [one.inputs.messages for one in world.events("request") if isinstance(one, RequestSubmitted)]


async def test_responses_of_a_conversation_continue_one_another() -> None:
    async with deployment() as world:
        conversation = await begun(
            world, items=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "zero"}]
        )
        first = await said(world, conversation, "one")
        await said(world, conversation, "two", instructions="Now in French.")
        found = await items(world, conversation)

    assert first["conversation"] == {"id": conversation}
    assert asked(world) == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "zero"},
            {"role": "user", "content": "one"},
        ],
        [
            {"role": "system", "content": "Now in French."},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "zero"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "two"},
        ],
    ]
    assert texts(found) == ["Be brief.", "zero", "one", "one", "two", "two"]
    assert [item["role"] for item in found[2:]] == ["user", "assistant"] * 2
    assert len({item["id"] for item in found}) == 6


async def test_an_output_is_read_once_and_is_in_the_conversation_from_then_on() -> None:
    async with deployment() as world:
        conversation = await begun(world)
        first = await said(world, conversation, "one")
        await said(world, conversation, "two")
        third = await said(world, conversation, "three")
        changes = [one for one in world.events("conversation") if isinstance(one, ConversationChanged)]

    assert [list(one.settled) for one in changes] == [
        [], [first["id"]], [changes[1].response],
    ]  # fmt: skip
    assert changes[2].response == third["id"]


async def test_items_are_added_read_paged_and_removed() -> None:
    async with deployment() as world:
        conversation = await begun(world, metadata={"a": "b"})
        added = await world.client.post(
            f"{PATH}/{conversation}/items",
            json={
                "items": [
                    {"role": "user", "content": "a"},
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "3"},
                ]
            },
        )
        ids = [item["id"] for item in added.json()["data"]]
        page = (await world.client.get(f"{PATH}/{conversation}/items", params={"limit": 2})).json()
        rest = await items(world, conversation, after=ids[0])
        one = await world.client.get(f"{PATH}/{conversation}/items/{ids[1]}")
        removed = await world.client.delete(f"{PATH}/{conversation}/items/{ids[0]}")
        again = await world.client.delete(f"{PATH}/{conversation}/items/{ids[0]}")
        await said(world, conversation, "next")

    assert [item["type"] for item in added.json()["data"]] == [
        "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[:0:-1], True)
    assert [item["id"] for item in rest] == ids[1:]
    assert one.json()["name"] == "f"
    assert removed.json()["metadata"] == {"a": "b"}
    assert (again.status_code, again.json()["error"]["code"]) == (404, "item_not_found")
    assert asked(world)[0][0]["tool_calls"][0]["id"] == "c1"
    assert asked(world)[0][1] == {"role": "tool", "tool_call_id": "c1", "content": "3"}


async def test_metadata_is_replaced_and_a_deleted_conversation_is_gone() -> None:
    async with deployment() as world:
        conversation = await begun(world, metadata={"a": "b"})
        changed = await world.client.post(f"{PATH}/{conversation}", json={"metadata": {"c": "d"}})
        response = await said(world, conversation, "one")
        deleted = await world.client.delete(f"{PATH}/{conversation}")
        gone = [
            await world.client.get(f"{PATH}/{conversation}"),
            await world.client.get(f"{PATH}/{conversation}/items"),
            await world.client.delete(f"{PATH}/{conversation}"),
            await world.client.post(RESPONSES, json={"input": "x", "conversation": conversation}),
        ]
        kept = await world.client.get(f"{RESPONSES}/{response['id']}")

    assert changed.json()["metadata"] == {"c": "d"}
    assert deleted.json()["deleted"] is True
    assert [one.status_code for one in gone] == [404] * 4
    assert gone[3].json()["error"]["param"] == "conversation"
    assert kept.status_code == 200


async def test_while_a_response_is_in_progress_the_conversation_is_locked() -> None:
    go_on = asyncio.Event()

    async def script(performance: Performance) -> None:
        await go_on.wait()
        await echo(performance)

    async with deployment(script) as world:
        conversation = await begun(world)
        running = await said(world, conversation, "one", background=True)
        locked = await world.client.post(RESPONSES, json={"input": "x", "conversation": conversation})
        during = await items(world, conversation)
        go_on.set()
        await world.until(lambda: world.performances[running["id"]].has_ended)
        await said(world, conversation, "two")

    assert (locked.status_code, locked.json()["error"]["code"]) == (409, "conversation_locked")
    assert locked.headers["x-should-retry"] == "false"
    assert during == []
    assert [message["content"] for message in asked(world)[1]] == ["one", "one", "two"]


async def test_of_two_responses_that_begin_together_one_is_refused() -> None:
    async with deployment() as world:
        conversation = await begun(world)
        async with asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(
                    world.client.post(RESPONSES, json={"input": text, "conversation": conversation})
                )
                for text in ("a", "b")
            ]
        statuses = sorted(one.result().status_code for one in both)
        found = await items(world, conversation)

    assert statuses == [200, 409]
    assert len(found) == 2
    assert len(asked(world)) == 1


async def test_a_response_that_fails_leaves_the_conversation_as_it_was() -> None:
    async def script(performance: Performance) -> None:
        if performance.event.inputs.messages == [{"role": "user", "content": "bad"}]:
            performance.fail(Failure(code="worker_crashed", message="it crashed", status=500))
        else:
            await echo(performance)

    async with deployment(script) as world:
        conversation = await begun(world)
        failed = await world.client.post(RESPONSES, json={"input": "bad", "conversation": conversation})
        refused = await world.client.post(
            RESPONSES, json={"input": "x", "conversation": conversation, "model": "unknown"}
        )
        await said(world, conversation, "good")
        found = await items(world, conversation)

    assert (failed.status_code, refused.status_code) == (500, 404)
    assert texts(found) == ["good", "good"]


@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_response_is_deleted_and_its_conversation_goes_on(*, ends_first: bool) -> None:
    async def script(performance: Performance) -> None:
        if performance.event.inputs.messages == [{"role": "user", "content": "wait"}]:
            await performance.cancelled.wait()
        else:
            await echo(performance)

    async with deployment(script) as world:
        conversation = await begun(world)
        first = await said(world, conversation, "one" if ends_first else "wait", background=not ends_first)
        await world.client.delete(f"{RESPONSES}/{first['id']}")
        gone = await world.client.get(f"{RESPONSES}/{first['id']}")
        await said(world, conversation, "two")
        found = await items(world, conversation)

    assert gone.status_code == 404
    assert texts(found) == (["one", "one", "two", "two"] if ends_first else ["two", "two"])


async def test_a_turn_that_never_reached_the_log_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployment() as world:
        conversation = await begun(world)
        conversations = store.StoredConversations(world.gateway, world.second, None)
        state = await conversations.one(conversation)
        await conversations.begin_turn(
            state, "resp-none", [{"id": "msg-1", "type": "message"}], await conversations.items(state)
        )
        locked = await world.client.post(RESPONSES, json={"input": "x", "conversation": conversation})
        monkeypatch.setattr(store, "_SUBMISSION_NS", 0)
        await said(world, conversation, "x")
        found = await items(world, conversation)

    assert locked.status_code == 409
    assert texts(found) == ["x", "x"]


async def test_a_response_that_is_asked_for_again_is_the_same_one() -> None:
    async with deployment() as world:
        conversation = await begun(world)
        first = await said(world, conversation, "one", request_id="r1")
        await said(world, conversation, "two")
        again = await said(world, conversation, "one", request_id="r1")
        found = await items(world, conversation)

    assert again["output"] == first["output"]
    assert texts(found) == ["one", "one", "two", "two"]
    assert len(asked(world)) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"store": False}, "store"),
        ({"conversation": 3}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation.name"),
        ({"conversation": "a.b"}, "conversation"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input[0].content[0].type"),
    ],
)
async def test_a_wrong_response_of_a_conversation_is_refused_by_name(
    body: dict[str, Any], param: str
) -> None:
    async with deployment() as world:
        conversation = await begun(world, items=[{"role": "user", "content": "zero"}])
        response = await world.client.post(
            RESPONSES, json={"input": "x", "conversation": conversation, **body}
        )

    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"role": "wizard", "content": "x"}]}, "items[0].role"),
        ({"items": [{"type": "web_search_call"}]}, "items[0].type"),
        ({"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ({"items": "x"}, "items"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"meta": {}}, "body.meta"),
    ],
)
async def test_a_wrong_conversation_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with deployment() as world:
        response = await world.client.post(PATH, json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param, response.text
    assert world.events("conversation") == []


async def test_a_conversation_belongs_to_its_key() -> None:
    keys = [ApiKey(name=name, secret=name[0] * 20) for name in ("anna", "ben")]
    anna, ben = ({"authorization": f"Bearer {key.secret}"} for key in keys)
    async with deployment(keys=keys) as world:
        made = await world.client.post(PATH, json={}, headers=anna)
        path = f"{PATH}/{made.json()['id']}"
        statuses = [
            (await world.client.get(path, headers=anna)).status_code,
            (await world.client.get(path, headers=ben)).status_code,
            (await world.client.get(f"{path}/items", headers=ben)).status_code,
            (await world.client.delete(path, headers=ben)).status_code,
            (
                await world.client.post(
                    RESPONSES, json={"input": "x", "conversation": made.json()["id"]}, headers=ben
                )
            ).status_code,
        ]

    assert statuses == [200, 404, 404, 404, 404]


async def test_openais_sdk_has_a_conversation() -> None:
    async with (
        deployment() as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        conversation = await client.conversations.create(
            metadata={"topic": "demo"}, items=[{"type": "message", "role": "user", "content": "Hello!"}]
        )
        stream = await client.responses.create(
            model="demo", input="one two", conversation=conversation.id, stream=True
        )
        kinds = [event.type async for event in stream]
        response = await client.responses.create(
            model="demo", input="three", conversation={"id": conversation.id}
        )
        await client.conversations.update(conversation.id, metadata={"topic": "x"})
        found = [item async for item in client.conversations.items.list(conversation.id, order="asc")]
        one = await client.conversations.items.retrieve(found[0].id or "", conversation_id=conversation.id)
        await client.conversations.items.delete(found[0].id or "", conversation_id=conversation.id)
        more = await client.conversations.items.create(
            conversation.id, items=[{"type": "message", "role": "user", "content": "bye"}]
        )
        retrieved = await client.conversations.retrieve(conversation.id)
        deleted = await client.conversations.delete(conversation.id)

    assert kinds[-1] == "response.completed"
    assert response.conversation is not None
    assert response.conversation.id == conversation.id
    assert [item.type for item in found] == ["message"] * 5
    assert one.id == found[0].id
    assert len(more.data) == 1
    assert retrieved.metadata == {"topic": "x"}
    assert deleted.deleted
