"""`/v1/files`: stored once per key, listed, read, deleted; an upload that broke off goes on."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from configs.deployment import MediaSettings
from configs.secrets import ApiKey
from shared.media.store import PIECE_BYTES
from tests.gateway.media.world import MP4, chat, data_url, image, png, seeing, stored_media, submitted
from tests.gateway.world import World, listening

FILES = "/v1/files"


def id_of(data: bytes) -> str:
    return f"file-{hashlib.sha256(data).hexdigest()}"


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def upload(world: World, content: bytes, name: str = "cat.png", **how: Any) -> httpx.Response:
    return await world.client.post(FILES, files={"file": (name, content)}, **how)


async def test_a_file_is_stored_listed_read_used_and_deleted() -> None:
    async with seeing() as world:
        made = (await upload(world, png(), data={"purpose": "vision"})).json()
        listed = (await world.client.get(FILES)).json()
        one = (await world.client.get(f"{FILES}/{made['id']}")).json()
        content = await world.client.get(f"{FILES}/{made['id']}/content")
        answer = await world.client.post("/v1/chat/completions", json=chat(image(made["id"])))
        [used] = submitted(world).inputs.files
        gone = (await world.client.delete(f"{FILES}/{made['id']}")).json()
        after = await world.client.get(f"{FILES}/{made['id']}")

    assert (made["id"], made["object"], made["bytes"]) == (id_of(png()), "file", len(png()))
    assert (made["filename"], made["purpose"], made["status"]) == ("cat.png", "vision", "processed")
    assert [file["id"] for file in listed["data"]] == [made["id"]]
    assert one["filename"] == "cat.png"
    assert content.content == png()
    assert content.headers["content-type"] == "image/png"
    assert content.headers["x-content-type-options"] == "nosniff"
    assert answer.status_code == 200
    assert (used.digest, used.content_type) == (made["sha256"], "image/png")
    assert gone == {"id": made["id"], "object": "file", "deleted": True}
    assert code_of(after) == (404, "file_not_found")


async def test_equal_bytes_are_one_file() -> None:
    async with seeing() as world:
        ids = {(await upload(world, png())).json()["id"] for _ in range(2)}
        stored = await stored_media(world)

    assert len(ids) == len(stored) == 1


async def test_a_file_belongs_to_its_key() -> None:
    keys = (ApiKey(name="one", secret="secret-one"), ApiKey(name="two", secret="secret-two"))
    one, two = ({"Authorization": f"Bearer secret-{name}"} for name in ("one", "two"))
    async with seeing(keys=keys) as world:
        place = f"{FILES}/{(await upload(world, png(), headers=one)).json()['id']}"
        others = (await world.client.get(FILES, headers=two)).json()["data"]
        seen = [
            await world.client.get(place, headers=two),
            await world.client.get(f"{place}/content", headers=two),
            await world.client.delete(place, headers=two),
        ]
        own = await world.client.get(place, headers=one)

    assert others == []
    assert [code_of(response) for response in seen] == [(404, "file_not_found")] * 3
    assert own.status_code == 200


@pytest.mark.parametrize(
    ("files", "data", "code"),
    [
        ({"file": ("a.txt", b"plain words")}, {}, (400, "unsupported_media")),
        ({"file": ("a.png", MP4, "image/png")}, {}, (400, "media_type_mismatch")),
        ({"file": ("a.png", png(comment=bytes(5000)))}, {}, (413, "media_too_large")),
        ({"file": ("a.png", png())}, {"purpose": "fun"}, (400, "invalid_value")),
        ({"file": ("a.png", png())}, {"colour": "red"}, (400, "unknown_parameter")),
        ({"document": ("a.png", png())}, {}, (400, "unknown_parameter")),
        ({"file": ("a.png", b"")}, {}, (400, "unsupported_media")),
    ],
)
async def test_a_wrong_upload_is_refused_and_leaves_nothing(
    files: Any, data: Any, code: tuple[int, str]
) -> None:
    async with seeing(MediaSettings(max_bytes=4096)) as world:
        response = await world.client.post(FILES, files=files, data=data)
        left = await stored_media(world)

    assert code_of(response) == code
    assert left == []


async def test_the_list_has_pages() -> None:
    async with seeing() as world:
        made = [(await upload(world, png(number))).json()["id"] for number in range(3)]
        first = (await world.client.get(FILES, params={"limit": 2, "order": "asc"})).json()
        second = (await world.client.get(FILES, params={"after": first["last_id"], "order": "asc"})).json()
        wrong = await world.client.get(FILES, params={"limit": 0})

    assert (len(first["data"]), first["has_more"]) == (2, True)
    assert {file["id"] for file in first["data"] + second["data"]} == set(made)
    assert second["has_more"] is False
    assert code_of(wrong) == (400, "invalid_value")


# ---- uploads by digest ---------------------------------------------------------------------------------


async def broken_off(data: bytes) -> AsyncIterator[bytes]:
    yield data
    raise ConnectionError


@pytest.mark.processes
async def test_an_upload_that_broke_off_goes_on_where_it_ended() -> None:
    data = png(comment=bytes(2 * PIECE_BYTES))
    async with seeing() as world, listening(world) as url, httpx.AsyncClient(base_url=url) as client:
        place = f"{FILES}/{id_of(data)}"
        headers = {"content-length": str(len(data)), "content-type": "image/png"}
        with pytest.raises(ConnectionError):
            await client.put(place, content=broken_off(data[: PIECE_BYTES + 9]), headers=headers)
        await world.until(lambda: world.media.memory.stored_bytes >= PIECE_BYTES)  # type: ignore[attr-defined]
        state = (await client.get(place)).json()
        start = state["received_bytes"]
        span = {"content-range": f"bytes {start}-{len(data) - 1}/{len(data)}", "content-type": "image/png"}
        done = await client.put(place, content=data[start:], headers=span)
        content = await client.get(f"{place}/content")

    assert (state["status"], start) == ("uploading", PIECE_BYTES)
    assert (done.status_code, done.json()["bytes"]) == (200, len(data))
    assert content.content == data


async def test_bytes_of_another_digest_are_refused_and_leave_nothing() -> None:
    async with seeing() as world:
        response = await world.client.put(f"{FILES}/{id_of(png(1))}", content=png(2))
        unknown = await world.client.put(f"{FILES}/file-abc", content=png(2))
        left = world.media.memory.stored_bytes  # type: ignore[attr-defined]

    assert code_of(response) == (400, "media_digest_mismatch")
    assert code_of(unknown) == (404, "file_not_found")
    assert left == 0


@pytest.mark.parametrize(
    ("span", "status"),
    [
        ("bytes 0-9/100", 400),
        ("bytes 9-0/10", 400),
        ("bytes a-b/c", 400),
        (f"bytes 524288-{524288 + 67}/{524288 + 68}", 416),
        ("bytes 5-8/9", 416),
    ],
)
async def test_a_position_that_is_not_there_is_refused(span: str, status: int) -> None:
    async with seeing() as world:
        response = await world.client.put(
            f"{FILES}/{id_of(png())}", content=png(), headers={"content-range": span}
        )

    assert response.status_code == status
    assert response.json()["error"]["param"] == "content-range"


async def test_a_size_that_is_not_that_of_the_stored_file_is_refused() -> None:
    async with seeing() as world:
        await upload(world, png())
        response = await world.client.put(
            f"{FILES}/{id_of(png())}", content=b"other", headers={"content-range": "bytes 7-11/12"}
        )

    assert code_of(response) == (416, "invalid_range")
    assert f"{len(png())}, found 12" in response.json()["error"]["message"]


async def test_a_put_is_checked_like_an_upload() -> None:
    text = b"plain words"
    large = png(comment=bytes(5000))
    async with seeing(MediaSettings(max_bytes=4096)) as world:
        unknown = await world.client.put(f"{FILES}/{id_of(text)}", content=text)
        big = await world.client.put(f"{FILES}/{id_of(large)}", content=large)
        left = world.media.memory.stored_bytes  # type: ignore[attr-defined]

    assert code_of(unknown) == (400, "unsupported_media")
    assert code_of(big) == (413, "media_too_large")
    assert left == 0


# ---- OpenAI's own client -------------------------------------------------------------------------------


@pytest.mark.processes
async def test_openais_client_stores_files_and_asks_about_images() -> None:
    async with (
        seeing() as world,
        listening(world) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        file = await client.files.create(file=("cat.png", png()), purpose="vision")
        found = await client.files.retrieve(file.id)
        listed = [one.id async for one in client.files.list()]
        content = await client.files.content(file.id)
        answer = await client.chat.completions.create(
            model="demo",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data_url(png()), "detail": "auto"}},
                        {"type": "file", "file": {"file_id": file.id}},
                        {"type": "text", "text": "Which is red?"},
                    ],
                }
            ],
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="demo",
                messages=[
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}],
                    }
                ],
            )
        deleted = await client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)

    assert (found.filename, found.bytes, listed) == ("cat.png", len(png()), [file.id])
    assert content.content == png()
    assert answer.choices[0].message.content == "image image"
    assert refused.value.param == "messages[0].content[0].image_url"
    assert refused.value.code == "media_host_not_allowed"
    assert deleted.deleted
