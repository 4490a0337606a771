"""`/v1/videos/generations` against a scripted model: M*'s answers, and mini-sglang's."""

import base64
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from models.media.encoders import encode_image
from shared.events import RequestSubmitted
from tests.gateway.media.world import png
from tests.gateway.videos.filming import DIRECTOR, FPS, advise, film, put_film
from tests.gateway.world import Performance, deployment

GENERATIONS: Final = "/v1/videos/generations"
ASKED: Final = {"model": "demo", "prompt": "a red kite"}
PNGS: Final = [encode_image(np.full((8, 8, 3), number, np.uint8)).tobytes() for number in (10, 200)]


async def shoot(performance: Performance) -> None:
    """Film, or give two frames."""
    advise(performance, 1)
    if performance.event.params.options.get("frames"):
        for data in PNGS:
            performance.value("image", data, {"content_type": "image/png"})
    else:
        put_film(performance, pieces=2)
        put_film(performance)
    performance.finish()


async def post(**asked: Any) -> tuple[dict[str, Any], int, list[RequestSubmitted], bytes]:
    """Ask; return the answer, its status, the requests, and the bytes at its first address."""
    async with deployment(shoot, served=replace(DIRECTOR, modalities=("text", "image", "video"))) as world:
        response = await world.client.post(GENERATIONS, json=ASKED | asked)
        body, at = response.json(), b""
        if response.status_code == 200 and (url := body["data"][0].get("url")):
            at = (await world.client.get(url)).content
        events = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
        return body, response.status_code, events, at


async def test_m_stars_answer_has_the_videos_in_base64_and_its_fields_become_options() -> None:
    image = "data:image/png;base64," + base64.b64encode(png()).decode()
    body, _, events, _ = await post(
        size="1280x704", num_frames=81, fps=24, n=2, seed=3, guidance_scale=5, image=image,
        extra_body=None,
    )  # fmt: skip

    assert set(body) == {"created", "data", "usage"}
    assert [base64.b64decode(one.pop("b64_json")) for one in body["data"]] == [film()] * 2
    about = {"content_type": "video/mp4", "size": "64x48", "fps": 8, "frames": 9, "seconds": 1.125}
    assert body["data"] == [{"url": None, **about}] * 2
    assert [(one.params.seed, one.params.choice) for one in events] == [(3, 0), (3, 1)]
    assert events[0].params.options == {
        "width": 1280, "height": 704, "num_frames": 81, "fps": 24, "guidance_scale": 5,
    }  # fmt: skip
    assert [file.modality for file in events[0].inputs.files] == ["image"]


async def test_mini_sglangs_answers_have_the_video_or_its_frames() -> None:
    video, _, [event], _ = await post(response_format="b64_mp4", aspect="16:9", steps=25, device="auto")
    frames, _, _, _ = await post(response_format="frames_b64_png", fps=FPS)

    assert base64.b64decode(video["data"][0]["b64_mp4"]) == film()
    assert video["data"][0]["fps"] == FPS
    assert event.params.options == {"width": 1280, "height": 720, "num_inference_steps": 25}
    [found] = frames["data"]
    assert [base64.b64decode(one) for one in found["frames_b64_png"]] == PNGS
    assert found["fps"] == FPS


async def test_a_video_can_be_had_by_its_address() -> None:
    body, _, _, at = await post(response_format="url")
    assert body["data"][0]["b64_json"] is None
    assert at == film()


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("size", "huge", "size"),
        ("aspect", "2:1", "aspect"),
        ("n", 5, "n"),
        ("num_frames", 0, "num_frames"),
        ("fps", -1, "fps"),
        ("frames", True, "frames"),
        ("response_format", "gif", "response_format"),
        ("model_dir", "/etc", "model_dir"),
        ("compile", True, "compile"),
        ("image", "nowhere", "image"),
        ("framez", 3, "framez"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(field: str, value: object, param: str) -> None:
    body, status, events, _ = await post(**{field: value})
    assert (status, body["error"]["param"], events) == (400, param, []), body


async def test_an_image_and_a_video_exclude_each_other() -> None:
    body, status, _, _ = await post(image="file-1", video="file-2")
    assert (status, body["error"]["param"]) == (400, "video")
