"""Requests with media: events name them by digest, errors name their place, a refusal leaves nothing."""

import asyncio
import base64
import hashlib
import json
from typing import Any

import pytest

from configs.deployment import MediaSettings
from configs.secrets import ApiKey
from gateway.http.bodies import parse_object
from shared.events import Failure
from tests.gateway.media.world import (
    GIF,
    MP4,
    SEES,
    WAV,
    chat,
    data_url,
    image,
    png,
    seeing,
    stored,
    stored_media,
    submitted,
)
from tests.gateway.world import Performance, deployment

CHAT = "/v1/chat/completions"


def error_of(response: Any) -> tuple[int, str | None, str]:
    error = parse_object(response.content)["error"]
    return response.status_code, error["param"], error["code"]


async def test_a_data_url_becomes_a_file_of_the_event_and_its_bytes_are_in_the_store() -> None:
    async with seeing() as world:
        response = await world.client.post(CHAT, json=chat(image(data_url(png()))))
        event = submitted(world)
        [file] = event.inputs.files

        assert response.json()["choices"][0]["message"]["content"] == "image"
        assert event.inputs.messages is not None
        assert event.inputs.messages[0]["content"][0] == {"type": "image", "file": 0}
        assert event.inputs.input_modalities == ["image", "text"]
        assert (file.modality, file.content_type, file.size) == ("image", "image/png", len(png()))
        assert file.digest == hashlib.sha256(png()).hexdigest()
        assert await stored(world, file) == png()


async def test_no_event_contains_the_bytes_of_a_medium() -> None:
    secret = b"the bytes of a picture" * 100
    async with seeing() as world:
        await world.client.post(CHAT, json=chat(image(data_url(png(comment=secret)))))
        data = b"".join(record.data for record in world.server.records)

    assert b"the bytes of a picture" not in data
    assert base64.b64encode(secret)[:40] not in data


async def test_all_kinds_of_parts_keep_their_order_over_several_messages() -> None:
    body = chat(
        image(data_url(png(1))),
        {"type": "video_url", "video_url": {"url": data_url(MP4, "video/mp4")}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}},
    )
    body["messages"] += [
        {"role": "assistant", "content": "A dot."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And this?"},
                {"type": "file", "file": {"file_data": data_url(png(2)), "filename": "../dot two.png"}},
            ],
        },
    ]
    async with seeing() as world:
        await world.client.post(CHAT, json=body)
        inputs = submitted(world).inputs

    messages = inputs.messages or []
    assert [file.modality for file in inputs.files] == ["image", "video", "audio", "image"]
    assert [part.get("file") for part in messages[0]["content"]] == [0, 1, 2, None]
    assert messages[2]["content"][1] == {"type": "image", "file": 3}
    assert inputs.files[3].name == "dot two.png"


async def test_the_same_image_twice_is_two_files_and_one_medium() -> None:
    async with seeing() as world:
        await world.client.post(CHAT, json=chat(image(data_url(png())), image(data_url(png()))))
        files = submitted(world).inputs.files

        assert len(files) == 2
        assert len(await stored_media(world)) == 1


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        (image(data_url(MP4)), "image_url", "media_type_mismatch"),
        (image(data_url(MP4, "video/mp4")), "image_url", "media_type_mismatch"),
        (image(data_url(png(), "video/mp4")), "image_url", "media_type_mismatch"),
        (image(data_url(b"%PDF-1.7")), "image_url", "unsupported_media"),
        (image(data_url(b"plain words")), "image_url", "unsupported_media"),
        (image(data_url(b"")), "image_url", "unsupported_media"),
        (image("data:image/png;base64,iVBO*"), "image_url", "invalid_base64"),
        (image("data:image/png;base64"), "image_url", "invalid_value"),
        (image("ftp://a.example/cat.png"), "image_url", "invalid_value"),
        (image("file:///etc/passwd"), "image_url", "invalid_value"),
        (image("https://a.example/cat.png"), "image_url", "media_host_not_allowed"),
        (image("file-" + "0" * 64), "image_url", "media_gone"),
        (image("file-abc"), "image_url", "media_gone"),
        ({"type": "image_url", "image_url": "x"}, "image_url", "invalid_value"),
        ({"type": "image_url"}, "image_url", "invalid_value"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url", "invalid_value"),
        (
            {"type": "image_url", "image_url": {"url": data_url(png()), "detail": "low"}},
            "image_url.detail",
            "not_supported",
        ),
        (
            {"type": "image_url", "image_url": {"url": data_url(png()), "size": 3}},
            "image_url.size",
            "unknown_parameter",
        ),
        ({"type": "input_audio", "input_audio": {"data": "*"}}, "input_audio", "invalid_base64"),
        (
            {
                "type": "input_audio",
                "input_audio": {"data": base64.b64encode(png()).decode(), "format": "wav"},
            },
            "input_audio",
            "media_type_mismatch",
        ),
        ({"type": "file", "file": {}}, "file", "invalid_value"),
        ({"type": "file", "file": {"file_id": "cat.png"}}, "file", "media_gone"),
        ({"type": "file", "file": 0}, "file", "invalid_value"),
        ({"type": "file", "file": {"file_id": "file-" + "0" * 64}}, "file", "media_gone"),
        ({"type": "image", "file": 0}, "file", "invalid_value"),
        ({"type": "picture"}, "", "invalid_value"),
    ],
)
async def test_a_wrong_medium_is_refused_by_its_place_and_leaves_nothing(
    part: dict[str, Any], param: str, code: str
) -> None:
    async with seeing() as world:
        response = await world.client.post(CHAT, json=chat(image(data_url(png(7))), part))
        left = [*world.events("request"), *await stored_media(world)]

    status, found_param, found_code = error_of(response)
    place = f"messages[0].content[1].{param}".rstrip(".")
    assert 400 <= status < 500
    assert (found_param, found_code) == (place, code)
    assert response.json()["error"]["message"].startswith(place) or code == "unknown_parameter"
    assert left == []


async def test_an_image_is_refused_by_a_text_model_before_it_is_decoded() -> None:
    async with deployment() as world:
        response = await world.client.post(CHAT, json=chat(image("data:image/png;base64,*")))

    assert error_of(response) == (400, "messages[0].content[0].image_url", "unsupported_modality")


async def test_media_are_taken_from_users_and_tools_alone() -> None:
    body = chat()
    body["messages"].insert(0, {"role": "system", "content": [image(data_url(png()))]})
    async with seeing() as world:
        response = await world.client.post(CHAT, json=body)

    assert error_of(response) == (400, "messages[0].content[0]", "invalid_value")


async def test_files_are_limited_in_number_and_size() -> None:
    limits = MediaSettings(max_files=2, max_bytes=4096, max_request_bytes=5000)
    large = image(data_url(png(comment=bytes(4096))))
    half = [image(data_url(png(n, comment=bytes(3000)))) for n in (1, 2)]
    async with seeing(limits) as world:
        many = await world.client.post(CHAT, json=chat(*[image(data_url(png()))] * 3))
        big = await world.client.post(CHAT, json=chat(large))
        together = await world.client.post(CHAT, json=chat(*half))
        left = [*world.events("request"), *await stored_media(world)]

    assert error_of(many) == (400, "messages[0].content[2].image_url", "too_many_files")
    assert error_of(big) == (413, "messages[0].content[0].image_url", "media_too_large")
    assert error_of(together) == (413, "messages[0].content[1].image_url", "media_too_large")
    assert left == []


async def test_a_wrong_parameter_beside_a_medium_leaves_nothing() -> None:
    async with seeing() as world:
        response = await world.client.post(CHAT, json=chat(image(data_url(png())), temperature=-1))
        left = await stored_media(world)

    assert error_of(response)[1] == "temperature"
    assert left == []


async def test_the_request_is_published_after_its_media_are_stored() -> None:
    async with seeing() as world:
        gate, put = asyncio.Event(), world.media.put

        async def slow(*args: Any, **how: Any) -> Any:
            await gate.wait()
            return await put(*args, **how)

        world.media.put = slow  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(world.client.post(CHAT, json=chat(image(data_url(png())))))
            for _ in range(200):
                await asyncio.sleep(0)
            before = world.events("request")
            gate.set()
        assert asking.result().status_code == 200

    assert before == []


async def test_a_store_without_room_refuses_the_request() -> None:
    async with seeing() as world:
        world.media.memory.max_bytes = 10  # type: ignore[attr-defined]
        response = await world.client.post(CHAT, json=chat(image(data_url(png()))))
        left = world.events("request")

    assert (response.status_code, error_of(response)[2]) == (503, "media_store_full")
    assert left == []


async def test_choices_share_their_media() -> None:
    async with seeing() as world:
        response = await world.client.post(CHAT, json=chat(image(data_url(png())), n=2))
        digests = {event.inputs.files[0].digest for event in world.events("request")}  # type: ignore[attr-defined]

    assert response.status_code == 200
    assert len(digests) == 1


async def test_a_medium_that_a_worker_refuses_is_named_by_its_place_in_the_body() -> None:
    async def damaged(performance: Performance) -> None:
        message = "files[1] ('cut.png'): expected a complete image, found damage"
        performance.fail(Failure(code="invalid_media", message=message, status=400))

    files = [("files", ("a.png", png())), ("files", ("cut.png", png()))]
    async with deployment(damaged, served=SEES) as world:
        parts = [image(data_url(png())), image(data_url(png(2)))]
        in_chat = await world.client.post(CHAT, json=chat(*parts))
        in_form = await world.client.post("/generate", data={"text": "hi"}, files=files)

    place = "messages[0].content[1].image_url"
    assert error_of(in_chat) == (400, place, "invalid_media")
    assert (
        in_chat.json()["error"]["message"] == f"{place} ('cut.png'): expected a complete image, found damage"
    )
    assert error_of(in_form) == (400, "files[1]", "invalid_media")


# ---- /generate -----------------------------------------------------------------------------------------


async def test_files_of_a_form_come_before_its_text() -> None:
    files: Any = [("files", ("cat.png", png(), "image/png")), ("files", ("talk.mp4", MP4))]
    data = {"text": "What is it?", "streaming": "false"}
    async with seeing() as world:
        response = await world.client.post("/generate", data=data, files=files)
        inputs = submitted(world).inputs

    assert response.status_code == 200
    assert (inputs.text, inputs.chat) == ("What is it?", True)
    assert [(file.modality, file.name) for file in inputs.files] == [
        ("image", "cat.png"),
        ("video", "talk.mp4"),
    ]


async def test_a_file_needs_no_text() -> None:
    async with seeing() as world:
        response = await world.client.post("/generate", files={"files": ("a.mp4", MP4)})
        inputs = submitted(world).inputs

    assert response.status_code == 200
    assert (inputs.text, len(inputs.files)) == ("", 1)
    assert inputs.input_modalities == ["video"]


@pytest.mark.parametrize(
    "file",
    [
        data_url(png()),
        {"url": data_url(png()), "name": "cat.png"},
        {"data": base64.b64encode(png()).decode(), "content_type": "image/png"},
    ],
)
async def test_json_describes_files(file: Any) -> None:
    async with seeing() as world:
        response = await world.client.post("/generate", json={"text": "hi", "files": [file]})
        [medium] = submitted(world).inputs.files

    assert response.status_code == 200
    assert (medium.modality, medium.digest) == ("image", hashlib.sha256(png()).hexdigest())


async def test_messages_place_uploads_by_index() -> None:
    content = [
        {"type": "text", "text": "Which is red?"},
        {"type": "image", "file": 1},
        {"type": "image", "file": 0},
    ]
    messages = json.dumps([{"role": "user", "content": content}])
    files = [("files", ("a.png", png(1))), ("files", ("b.png", png(2)))]
    async with seeing() as world:
        response = await world.client.post("/generate", data={"messages": messages}, files=files)
        inputs = submitted(world).inputs
        unplaced = await world.client.post("/generate", data={"messages": messages}, files=[*files, files[0]])

    assert response.status_code == 200
    assert inputs.messages == [{"role": "user", "content": content}]
    assert error_of(unplaced) == (400, "files[2]", "invalid_value")


async def test_an_upload_has_the_modality_as_which_messages_place_it() -> None:
    async with seeing() as world:
        found = []
        for kind, file in (("video", GIF), ("image", MP4)):
            messages = json.dumps([{"role": "user", "content": [{"type": kind, "file": 0}]}])
            files = {"files": ("a", file)}
            found.append(await world.client.post("/generate", data={"messages": messages}, files=files))
        [medium] = submitted(world).inputs.files

    assert medium.modality == "video"
    assert error_of(found[1]) == (400, "files[0]", "media_type_mismatch")


@pytest.mark.parametrize(
    ("content", "declared", "code"),
    [
        (b"\x00\x01nothing known", None, "unsupported_media"),
        (MP4, "image/png", "media_type_mismatch"),
        (png(), "video/mp4", "media_type_mismatch"),
    ],
)
async def test_a_wrong_upload_is_refused_by_its_index(
    content: bytes, declared: str | None, code: str
) -> None:
    wrong = ("b.bin", content, declared) if declared else ("b.bin", content)
    files = [("files", ("a.png", png(), "image/png")), ("files", wrong)]
    async with seeing() as world:
        response = await world.client.post("/generate", data={"text": "hi"}, files=files)
        left = [*world.events("request"), *await stored_media(world)]

    assert error_of(response) == (400, "files[1]", code)
    assert left == []


async def test_a_form_may_be_larger_than_a_json_body_but_its_text_may_not() -> None:
    large = png(comment=bytes(100_000))
    async with seeing(max_body_bytes=10_000) as world:
        taken = await world.client.post("/generate", data={"text": "hi"}, files={"files": ("a.png", large)})
        texts = {f"f{n}": "x" * 6000 for n in range(2)}
        refused = await world.client.post("/generate", data=texts, files={"files": ("a.png", png())})

    assert taken.status_code == 200
    assert error_of(refused) == (400, None, "invalid_form")


async def test_more_uploads_than_allowed_are_refused_while_they_arrive() -> None:
    files = [("files", (f"{n}.png", png())) for n in range(3)]
    async with seeing(MediaSettings(max_files=2)) as world:
        response = await world.client.post("/generate", data={"text": "hi"}, files=files)

    assert error_of(response) == (400, "files", "too_many_files")


async def test_a_medium_is_used_as_the_first_modality_that_the_model_takes() -> None:
    async with seeing() as world:
        await world.client.post("/generate", data={"text": "hi"}, files={"files": ("a.gif", GIF)})
        [as_image] = submitted(world).inputs.files
        url = data_url(GIF, "image/gif")
        part = {"type": "video_url", "video_url": {"url": url}}
        response = await world.client.post(CHAT, json=chat(part))

    assert as_image.modality == "image"
    assert response.json()["choices"][0]["message"]["content"] == "video"


# ---- tenants, options ----------------------------------------------------------------------------------


async def test_a_file_of_another_key_does_not_exist() -> None:
    keys = (ApiKey(name="one", secret="secret-one"), ApiKey(name="two", secret="secret-two"))
    one, two = ({"Authorization": f"Bearer secret-{name}"} for name in ("one", "two"))
    async with seeing(keys=keys) as world:
        uploaded = await world.client.post("/v1/files", files={"file": ("a.png", png())}, headers=one)
        body = chat(image(uploaded.json()["id"]))
        own = await world.client.post(CHAT, json=body, headers=one)
        other = await world.client.post(CHAT, json=body, headers=two)

    assert own.status_code == 200
    assert error_of(other) == (410, "messages[0].content[0].image_url", "media_gone")


async def test_options_of_the_family_reach_the_event_and_wrong_ones_are_refused_by_name() -> None:
    async with seeing() as world:
        await world.client.post(CHAT, json=chat(detail_level=3))
        [event] = world.events("request")
        nested = await world.client.post(CHAT, json=chat(options={"detail_level": 9}))
        wrong = await world.client.post(CHAT, json=chat(detail_level="much"))
        misspelt = await world.client.post(CHAT, json=chat(detail_lvel=3))
        kwargs = {"text": "hi", "model_kwargs": {"detail_level": 9}}
        generate = await world.client.post("/generate", json=kwargs)
        fine = await world.client.post("/generate", json={"text": "hi", "model_kwargs": {"detail_level": 4}})
        last = world.events("request")[-1]

    assert event.params.options == {"detail_level": 3}  # type: ignore[attr-defined]
    assert last.params.options == {"detail_level": 4}  # type: ignore[attr-defined]
    assert fine.status_code == 200
    assert error_of(nested) == (400, "options.detail_level", "invalid_value")
    assert error_of(wrong) == (400, "detail_level", "invalid_value")
    assert error_of(misspelt) == (400, "detail_lvel", "unknown_parameter")
    assert "did you mean 'detail_level'?" in misspelt.json()["error"]["message"]
    assert error_of(generate) == (400, "model_kwargs.detail_level", "invalid_value")


async def test_the_model_document_shows_modalities_limits_and_options() -> None:
    async with seeing(MediaSettings(max_files=3)) as world:
        found = (await world.client.get("/v1/models/demo")).json()

    assert found["input_modalities"] == ["text", "image", "video", "audio"]
    assert found["output_modalities"] == ["text"]
    assert found["limits"]["max_files"] == 3
    assert found["options"]["properties"]["detail_level"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 8,
        "default": 2,
        "description": "patches per side.",
    }
