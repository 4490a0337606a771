"""OpenAI's video jobs against a scripted model, with OpenAI's own client where it has the call."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import openai
import pytest
from PIL import Image

from configs.secrets import ApiKey
from gateway.app import create_app
from gateway.requests.service import Gateway
from gateway.videos import job_store
from shared.events import Failure, RequestCancel, RequestSubmitted
from shared.log.memory import MemoryLog
from tests.admissions import admitted
from tests.gateway.media.world import png
from tests.gateway.videos.filming import DIRECTOR, FRAMES, accept, advise, film, shoot
from tests.gateway.world import SERVED, Performance, Script, World, deployment, listening

ASKED: Final = {"model": "demo", "prompt": "a red kite"}
VIDEOS: Final = "/v1/videos"
PNG_URL: Final = "data:image/png;base64," + base64.b64encode(png()).decode()


@asynccontextmanager
async def filming(script: Script = shoot, **how: Any) -> AsyncIterator[World]:
    async with deployment(script, served=how.pop("served", DIRECTOR), **how) as world:
        yield world


async def completed(world: World, **asked: Any) -> dict[str, Any]:
    """Ask for a job, and return it when it is complete."""
    job = (await world.client.post(VIDEOS, json=ASKED | asked)).json()
    while job["status"] not in ("completed", "failed"):
        job = (await world.client.get(f"{VIDEOS}/{job['id']}")).json()
    return dict(job)


def submitted(world: World) -> list[RequestSubmitted]:
    return [event for event in world.events("request") if isinstance(event, RequestSubmitted)]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_openais_client_creates_polls_downloads_lists_and_deletes() -> None:
    async with (
        filming() as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        made = await client.videos.create_and_poll(
            prompt="a red kite",
            size="720x1280",
            seconds="4",
            input_reference=("kite.png", png(), "image/png"),
            extra_body={"seed": 5},
            poll_interval_ms=1,
        )
        content = await client.videos.download_content(made.id)
        thumbnail = await client.videos.download_content(made.id, variant="thumbnail")
        other = await client.videos.create(prompt="two")
        listed = [one.id async for one in client.videos.list(limit=1)]
        deleted = await client.videos.delete(made.id)
        with pytest.raises(openai.NotFoundError, match="there is no video"):
            await client.videos.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="no model here does"):
            await client.videos.remix(made.id, prompt="x")
        [event, _] = submitted(world)

    assert (made.status, made.progress, made.size, made.seconds) == ("completed", 100, "64x48", "1.125")
    assert made.prompt == "a red kite"
    assert made.completed_at is not None
    assert content.content == film()
    assert Image.open(io.BytesIO(thumbnail.content)).format == "WEBP"
    assert listed == [other.id, made.id]
    assert deleted.deleted
    assert event.params.options == {"width": 720, "height": 1280, "seconds": 4.0}
    assert event.params.seed == 5
    assert [one.modality for one in event.inputs.files] == ["image"]
    assert event.inputs.output_modalities == ["video"]


async def test_a_job_shows_the_newest_progress_and_what_was_asked_for() -> None:
    gate = asyncio.Event()

    async def wait(performance: Performance) -> None:
        advise(performance, 1)
        advise(performance, 3)
        await gate.wait()
        await shoot(performance)

    async with filming(wait) as world:
        created = (await world.client.post(VIDEOS, json=ASKED | {"size": "32x16", "seconds": 2})).json()
        await world.until(lambda: len(world.events("output")) == 8)
        running = (await world.client.get(f"{VIDEOS}/{created['id']}")).json()
        early = await world.client.get(f"{VIDEOS}/{created['id']}/content")
        gate.set()
        done = await completed(world, request_id=None)

    assert created["status"] in ("queued", "in_progress")
    assert (running["status"], running["progress"]) == ("in_progress", 75)
    assert (running["size"], running["seconds"], running["completed_at"]) == ("32x16", "2", None)
    assert (early.status_code, early.json()["error"]["code"]) == (404, "video_not_ready")
    assert done["progress"] == 100


async def test_another_gateway_answers_the_same_and_a_new_one_too() -> None:
    async with filming() as world:
        job = await completed(world)
        other = Gateway(DIRECTOR, world.subjects, "g-other", world.gateway.settings)
        app = create_app(other)
        async with (
            asyncio.TaskGroup() as tasks,
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
        ):
            following = tasks.create_task(other.follower.follow(MemoryLog(world.server), world.media))
            await other.follower.followed.wait()
            there = (await client.get(f"{VIDEOS}/{job['id']}")).json()
            content = (await client.get(f"{VIDEOS}/{job['id']}/content")).content
            await client.delete(f"{VIDEOS}/{job['id']}")
            following.cancel()
        gone = await world.client.get(f"{VIDEOS}/{job['id']}")

    assert there == job
    assert content == film()
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "video_not_found")


async def test_content_has_ranges_and_pictures() -> None:
    async with filming() as world:
        path = f"{VIDEOS}/{(await completed(world))['id']}/content"
        part = await world.client.get(path, headers={"range": "bytes=10-19"})
        end = await world.client.get(path, headers={"range": "bytes=-5"})
        beyond = await world.client.get(path, headers={"range": f"bytes={len(film())}-"})
        head = await world.client.head(path)
        sheet = await world.client.get(path, params={"variant": "spritesheet"})
        unknown = await world.client.get(path, params={"variant": "poster"})

    assert (part.status_code, part.content) == (206, film()[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(film())}"
    assert end.content == film()[-5:]
    assert beyond.status_code == 416
    assert (head.headers["content-length"], head.headers["content-type"]) == (str(len(film())), "video/mp4")
    picture = Image.open(io.BytesIO(sheet.content))
    assert (picture.format, picture.width) == ("JPEG", 4 * 240)
    assert picture.height == 180 * -(-FRAMES // 4)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "variant")


async def test_jobs_belong_to_their_key() -> None:
    keys = [ApiKey(name="ann", secret="a" * 32), ApiKey(name="bob", secret="b" * 32)]
    ann, bob = ({"authorization": f"Bearer {letter * 32}"} for letter in "ab")
    async with filming(keys=keys) as world:
        job = (await world.client.post(VIDEOS, json=ASKED, headers=ann)).json()["id"]
        found = [await world.client.get(f"{VIDEOS}/{job}", headers=one) for one in (ann, bob)]
        content = await world.client.get(f"{VIDEOS}/{job}/content", headers=bob)
        deleted = await world.client.delete(f"{VIDEOS}/{job}", headers=bob)
        lists = [(await world.client.get(VIDEOS, headers=one)).json()["data"] for one in (ann, bob)]

    assert [one.status_code for one in found] == [200, 404]
    assert (content.status_code, deleted.status_code) == (404, 404)
    assert [[one["id"] for one in jobs] for jobs in lists] == [[job], []]


async def test_a_list_has_pages_in_either_order_and_reads_no_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_store, "_WINDOW", 2)
    async with filming() as world:
        ids = [(await completed(world, prompt=str(number)))["id"] for number in range(5)]
        await world.client.delete(f"{VIDEOS}/{ids[3]}")
        newest = (await world.client.get(VIDEOS, params={"limit": 2})).json()
        rest = (await world.client.get(VIDEOS, params={"limit": 2, "after": newest["last_id"]})).json()
        oldest = (await world.client.get(VIDEOS, params={"order": "asc", "limit": 3})).json()
        last = (await world.client.get(VIDEOS, params={"order": "asc", "after": oldest["last_id"]})).json()
        wrong = [
            await world.client.get(VIDEOS, params={name: value})
            for name, value in (("limit", "0"), ("limit", "x"), ("order", "up"), ("after", "video-none"))
        ]

    assert [one["id"] for one in newest["data"]] == [ids[4], ids[2]]
    assert (newest["has_more"], newest["first_id"], newest["last_id"]) == (True, ids[4], ids[2])
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([ids[1], ids[0]], False)
    assert [one["id"] for one in oldest["data"]] == ids[:3]
    assert ([one["id"] for one in last["data"]], last["has_more"]) == ([ids[4]], False)
    assert [one.status_code for one in wrong] == [400, 400, 400, 404]


async def test_a_deletion_cancels_a_job_that_runs() -> None:
    async def never(performance: Performance) -> None:
        advise(performance, 1)
        await performance.cancelled.wait()

    async with filming(never) as world:
        job = (await world.client.post(VIDEOS, json=ASKED)).json()["id"]
        performance = await world.performance()
        deleted = await world.client.delete(f"{VIDEOS}/{job}")
        await performance.cancelled.wait()
        gone = await world.client.get(f"{VIDEOS}/{job}")
        [cancel] = [event for event in world.events("control") if isinstance(event, RequestCancel)]

    assert deleted.json() == {"id": job, "object": "video.deleted", "deleted": True}
    assert gone.status_code == 404
    assert cancel.deletes


async def test_an_image_to_begin_with_may_be_larger_than_a_body_in_memory() -> None:
    large = png() + bytes(4000)
    async with filming(max_body_bytes=2000) as world:
        job = await world.client.post(VIDEOS, data=ASKED, files={"input_reference": ("a.png", large)})
    assert job.status_code == 200


async def test_a_job_that_is_refused_at_once_is_that_error_and_one_that_fails_says_why() -> None:
    async def refuse(performance: Performance) -> None:
        message = "height: the nearest is 64"
        performance.reject(Failure(code="invalid_value", message=message, status=400, param="height"))

    async def fail(performance: Performance) -> None:
        advise(performance, 1)
        performance.fail(Failure(code="worker_lost", message="the worker was lost", status=503))

    async with filming(refuse) as world:
        refused = await world.client.post(VIDEOS, json=ASKED | {"size": "720x1280"})
    async with filming(fail) as world:
        job = await completed(world)
        content = await world.client.get(f"{VIDEOS}/{job['id']}/content")

    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "size")
    assert error["message"] == "size (height): the nearest is 64"
    assert (job["status"], job["error"]) == (
        "failed", {"code": "worker_lost", "message": "the worker was lost"},
    )  # fmt: skip
    assert (content.status_code, content.json()["error"]["code"]) == (404, "no_video")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("size", "100x64", "size"),
        ("size", "big", "size"),
        ("seconds", "long", "seconds"),
        ("seconds", "21", "seconds"),
        ("prompt", "", "prompt"),
        ("steps", 101, "num_inference_steps"),
        ("frames", True, "frames"),
        ("input_reference", {"image_url": "data:,", "file_id": "file-x"}, "input_reference"),
        ("input_reference", 5, "input_reference"),
        ("n", 2, "n"),
    ],
)
async def test_what_is_out_of_range_is_refused_before_anything_is_computed(
    field: str, value: object, param: str
) -> None:
    async with filming() as world:
        response = await world.client.post(VIDEOS, json=ASKED | {field: value})
        assert world.events("request") == []

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


async def test_a_model_without_videos_says_so_on_every_route() -> None:
    async with filming(served=SERVED) as world:
        found = [
            await world.client.post(VIDEOS, json=ASKED),
            await world.client.get(VIDEOS),
            await world.client.get(f"{VIDEOS}/video-1"),
            await world.client.post(f"{VIDEOS}/generations", json=ASKED),
        ]

    assert {(one.status_code, one.json()["error"]["code"]) for one in found} == {
        (400, "unsupported_modality")
    }


async def test_a_job_whose_first_step_fails_is_refused_and_one_whose_second_fails_is_a_job() -> None:
    answered = asyncio.Event()

    async def fail(performance: Performance) -> None:
        performance.walk(admitted(performance.request_id))
        if performance.event.inputs.text == "late":
            accept(performance)
            await answered.wait()
        performance.fail(Failure(code="invalid_value", message="files[0]: no image", status=400))

    async with filming(fail) as world:
        image = {"input_reference": {"image_url": PNG_URL}}
        early = await world.client.post(VIDEOS, json=ASKED | image)
        late = await world.client.post(VIDEOS, json=ASKED | {"prompt": "late"})
        answered.set()
        await world.until(lambda: len(world.events("walk")) == 4)
        failed = (await world.client.get(f"{VIDEOS}/{late.json()['id']}")).json()

    error = early.json()["error"]
    assert (early.status_code, error["param"]) == (400, "input_reference.image_url")
    assert error["message"] == "input_reference.image_url: no image"
    assert late.json()["status"] == "in_progress"
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_value")
