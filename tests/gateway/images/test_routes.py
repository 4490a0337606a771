"""The image routes against a scripted model, with OpenAI's own client where it has the call."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from gateway.served_model import ServedModel
from models.bagel.options import BagelOptions
from models.media.encoders import encode_image
from shared.events import Failure, RequestSubmitted
from shared.output_pieces import piece_spans
from tests.gateway.videos.filming import FilmOptions
from tests.gateway.world import SERVED, Performance, World, deployment, listening

PAINTER: Final = replace(
    SERVED, modalities=("text", "image"), outputs=("text", "image"), options=BagelOptions
)
PIXELS: Final = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
VARIATIONS: Final = "/v1/images/variations"
PNG_URL: Final = "data:image/png;base64," + base64.b64encode(encode_image(PIXELS).tobytes()).decode()
ASKED: Final = {"model": "demo", "prompt": "a red circle"}


def put(performance: Performance, pixels: np.ndarray[Any, Any] = PIXELS, pieces: int = 99) -> None:
    """Put an image in the asked-for format into the log, in pieces of 1500 bytes."""
    form = performance.event.params.options.get("output_format", "png")
    data = encode_image(pixels, form).tobytes()
    for piece, start, stop in piece_spans("encode_image.image", len(data), 1500)[:pieces]:
        metadata = {"dtype": "uint8", "shape": [len(data)], "content_type": f"image/{form}", **piece.metadata}
        performance.value("image", data[start:stop], metadata)


def advise(performance: Performance, step: int) -> None:
    """Report a step, and show the image so far."""
    performance.value("progress", b"", {"progress": {"step": step, "steps": 2}}, advisory=True)
    preview = PIXELS[:10, :6] // step
    shape = {"dtype": "uint8", "shape": list(preview.shape)}
    performance.value("image", preview.tobytes(), shape, advisory=True)


async def draw(performance: Performance) -> None:
    """Think, show two previews, and draw twice, because the first attempt dies."""
    performance.say("a circle is round")
    for step in (1, 2):
        advise(performance, step)
    put(performance, 255 - PIXELS, pieces=1)
    put(performance)
    performance.finish(counts={"forwards": 90, "image_tokens": 2})


def opened(b64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64)))


@asynccontextmanager
async def painting(served: ServedModel = PAINTER) -> AsyncIterator[tuple[World, openai.AsyncOpenAI]]:
    """OpenAI's client against a gateway behind a socket."""
    async with (
        deployment(draw, served=served) as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield world, client


def submitted(world: World) -> list[RequestSubmitted]:
    return [event for event in world.events("request") if isinstance(event, RequestSubmitted)]


async def post(path: str, **how: Any) -> tuple[httpx.Response, list[RequestSubmitted]]:
    async with deployment(draw, served=how.pop("served", PAINTER)) as world:
        return await world.client.post(path, **how), submitted(world)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.processes
async def test_openais_client_draws_edits_and_streams() -> None:
    async with painting() as (world, client):
        drawn = await client.images.generate(
            prompt="a red circle", size="64x48", n=2, output_format="webp", extra_body={"seed": 5}
        )
        file = ("in.png", encode_image(PIXELS).tobytes())
        edited = await client.images.edit(image=[file, file], prompt="make it blue", n=1)
        stream = await client.images.generate(prompt="a cat", stream=True, partial_images=2)
        events = [event async for event in stream]
        *drawings, edit, streamed = submitted(world)

    images = [opened(one.b64_json or "") for one in drawn.data or []]
    assert [(image.format, image.size) for image in images] == [("WEBP", (56, 40))] * 2
    assert (drawn.size, drawn.output_format) == ("56x40", "webp")
    assert drawn.usage is not None
    assert drawn.usage.input_tokens_details.image_tokens == 4
    assert [(one.params.seed, one.params.choice) for one in drawings] == [(5, 0), (5, 1)]
    assert drawings[0].params.options == {"width": 64, "height": 48, "output_format": "webp"}
    assert drawings[0].inputs.output_modalities == ["image"]

    assert np.array_equal(np.asarray(opened((edited.data or [])[0].b64_json or "")), PIXELS)
    assert [file.modality for file in edit.inputs.files] == ["image", "image"]
    assert edit.inputs.input_modalities == ["image", "text"]

    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert streamed.params.options == {"partial_images": 2}


async def test_previews_are_pngs_with_their_number_and_the_end_has_the_usage() -> None:
    response, _ = await post(GENERATIONS, json=ASKED | {"stream": True, "partial_images": 3})
    first, second, last = events_of(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [first["partial_image_index"], second["partial_image_index"]] == [0, 1]
    assert first["size"] == "6x10"
    assert np.array_equal(np.asarray(opened(second["b64_json"])), PIXELS[:10, :6] // 2)
    assert np.array_equal(np.asarray(opened(last["b64_json"])), PIXELS)
    assert (last["size"], last["output_format"], last["background"]) == ("56x40", "png", "opaque")
    assert last["usage"]["input_tokens_details"] == {"text_tokens": 5, "image_tokens": 2}
    assert last["usage"]["counts"]["forwards"] == 90


async def test_each_of_several_streamed_images_has_its_number() -> None:
    response, _ = await post(GENERATIONS, json=ASKED | {"stream": True, "n": 3})
    done = [one for one in events_of(response) if one["type"] == "image_generation.completed"]
    assert sorted(one["index"] for one in done) == [0, 1, 2]
    assert [one["usage"]["total_tokens"] > 0 for one in done] == [False, False, True]


async def test_an_edit_refers_to_images_in_json() -> None:
    url = "data:image/png;base64," + base64.b64encode(encode_image(PIXELS).tobytes()).decode()
    body = {"prompt": "blue", "images": [{"image_url": url}], "stream": True, "cfg_img_scale": 1.5}
    response, [event] = await post(EDITS, json=body)
    assert [one["type"] for one in events_of(response)][-1] == "image_edit.completed"
    assert event.inputs.files[0].content_type == "image/png"
    assert event.params.options == {"cfg_img_scale": 1.5}


async def test_fields_of_a_form_are_numbers_again() -> None:
    data = {
        "prompt": "12",
        "n": "2",
        "seed": "3",
        "size": "32x32",
        "cfg_interval": "[0, 0.5]",
        "stream": "false",
    }
    files = {"image": ("a.png", encode_image(PIXELS).tobytes(), "image/png")}
    response, events = await post(EDITS, data=data, files=files)
    assert len(response.json()["data"]) == 2
    assert [(event.params.seed, event.params.choice) for event in events] == [(3, 0), (3, 1)]
    assert events[0].inputs.text == "12"
    assert events[0].params.options["cfg_interval"] == [0, 0.5]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("size", "100x64", "size"),
        ("size", "2048x2048", "size"),
        ("size", "big", "size"),
        ("n", 0, "n"),
        ("n", 11, "n"),
        ("quality", "hd", "quality"),
        ("response_format", "file", "response_format"),
        ("aspect", "2:1", "aspect"),
        ("aspect", "4:3", "aspect"),
        ("model_dir", "/etc", "model_dir"),
        ("output_format", "gif", "output_format"),
        ("output_compression", 101, "output_compression"),
        ("output_compression", 50, "output_compression"),
        ("partial_images", 4, "partial_images"),
        ("partial_images", 1, "partial_images"),
        ("background", "transparent", "background"),
        ("cfg_text_scale", -1, "cfg_text_scale"),
        ("num_timesteps", 1, "num_timesteps"),
        ("options", {"cfg_renorm_type": "none"}, "options.cfg_renorm_type"),
        ("width", 63, "width"),
        ("stepps", 3, "stepps"),
        ("prompt", "", "prompt"),
    ],
)
async def test_what_is_out_of_range_is_refused_before_anything_is_computed(
    field: str, value: object, param: str
) -> None:
    response, events = await post(GENERATIONS, json=ASKED | {field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(param)
    assert events == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("size", "100x64", "size (width): expected an integer that is a multiple of 16 (the nearest is 96)"),
        ("output_format", "gif", "output_format: expected one of jpeg"),
    ],
)
async def test_a_refusal_names_field_and_option_once(field: str, value: object, message: str) -> None:
    response, _ = await post(GENERATIONS, json=ASKED | {field: value})
    assert response.json()["error"]["message"].startswith(message)


async def test_an_edit_without_an_image_or_with_a_mask_is_refused() -> None:
    none, _ = await post(EDITS, json={"prompt": "x"})
    assert none.json()["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": "images",
        "code": "missing_required_parameter",
    }  # fmt: skip
    png = encode_image(PIXELS).tobytes()
    masked, _ = await post(
        EDITS, data={"prompt": "x"}, files=[("image", ("a.png", png)), ("mask", ("m.png", png))]
    )
    assert (masked.status_code, masked.json()["error"]["param"]) == (400, "mask")
    text, _ = await post(EDITS, data={"prompt": "x"}, files={"image": ("a.png", b"no image at all")})
    assert text.status_code == 400


async def test_a_model_that_does_not_draw_and_a_family_without_sizes_say_so() -> None:
    mute, _ = await post(GENERATIONS, json=ASKED, served=SERVED)
    assert (mute.status_code, mute.json()["error"]["code"]) == (400, "unsupported_modality")
    fixed, _ = await post(GENERATIONS, json=ASKED | {"size": "64x64"}, served=replace(PAINTER, options=None))
    assert fixed.json()["error"]["code"] == "not_supported"
    variations, _ = await post(VARIATIONS, json={"images": [{"image_url": PNG_URL}]})
    assert (variations.status_code, variations.json()["error"]["code"]) == (400, "not_supported")
    streamed, _ = await post(GENERATIONS, json=ASKED | {"response_format": "url", "stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "response_format")


async def test_an_image_can_be_had_by_the_address_of_a_stored_file() -> None:
    async with deployment(draw, served=PAINTER) as world:
        body = (
            await world.client.post(
                GENERATIONS, json=ASKED | {"response_format": "url", "n": 2, "output_format": "jpeg"}
            )
        ).json()
        files = [await world.client.get(one["url"]) for one in body["data"]]

    assert [set(one) for one in body["data"]] == [{"url"}] * 2
    assert [one.headers["content-type"] for one in files] == ["image/jpeg"] * 2
    assert Image.open(io.BytesIO(files[0].content)).size == (56, 40)


async def test_a_variation_needs_no_prompt_and_a_model_that_starts_from_an_image() -> None:
    served = replace(PAINTER, options=FilmOptions)
    png = encode_image(PIXELS).tobytes()
    response, [event] = await post(
        VARIATIONS, files={"image": ("a.png", png)}, data={"strength": "0.4"}, served=served
    )

    assert opened(response.json()["data"][0]["b64_json"]).size == (56, 40)
    assert (event.inputs.text, event.params.options) == ("", {"strength": 0.4})
    assert [file.modality for file in event.inputs.files] == ["image"]


async def test_a_failure_ends_a_stream_with_an_error() -> None:
    async def fail(performance: Performance) -> None:
        advise(performance, 1)
        await asyncio.sleep(0)
        performance.fail(Failure(code="worker_lost", message="gone", status=500))

    async with deployment(fail, served=PAINTER) as world:
        response = await world.client.post(GENERATIONS, json=ASKED | {"stream": True})
    *_, last = events_of(response)
    assert last["error"]["code"] == "worker_lost"


async def test_an_image_may_be_larger_than_a_body_in_memory() -> None:
    image = {"image": ("a.png", encode_image(PIXELS).tobytes())}
    async with deployment(draw, served=PAINTER, max_body_bytes=2000) as world:
        taken = await world.client.post(EDITS, data={"prompt": "x"}, files=image)
        refused = await world.client.post(EDITS, json={"prompt": "x", "images": [{"image_url": PNG_URL}]})
    assert (taken.status_code, refused.status_code) == (200, 413)


async def test_a_size_that_the_model_refuses_is_an_error_of_the_field() -> None:
    async def refuse(performance: Performance) -> None:
        message = "width: expected a multiple of 32, found 48; the nearest is 64"
        performance.reject(Failure(code="invalid_value", message=message, status=400, param="width"))

    async with deployment(refuse, served=PAINTER) as world:
        by_size = await world.client.post(GENERATIONS, json=ASKED | {"size": "48x48"})
        by_option = await world.client.post(GENERATIONS, json={**ASKED, "size": None, "width": 48})

    assert by_size.json()["error"]["param"] == "size"
    assert by_size.json()["error"]["message"].startswith("size (width): expected a multiple of 32")
    assert by_option.json()["error"]["param"] == "width"


# ---- chats ---------------------------------------------------------------------------------------------

QUESTION: Final = {"model": "demo", "messages": [{"role": "user", "content": "Draw."}]}


async def test_a_chat_has_images_as_parts_with_data_urls() -> None:
    response, [event] = await post(
        "/v1/chat/completions", json=QUESTION | {"modalities": ["text", "image"], "num_timesteps": 7}
    )
    message = response.json()["choices"][0]["message"]
    assert event.inputs.output_modalities == ["text", "image"]
    assert event.params.options == {"num_timesteps": 7}
    assert message["content"] == "a circle is round"
    [image] = message["images"]
    head, data = image["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    assert np.array_equal(np.asarray(opened(data)), PIXELS)


async def test_a_streamed_chat_has_each_image_in_one_delta() -> None:
    response, _ = await post(
        "/v1/chat/completions", json=QUESTION | {"modalities": ["image"], "stream": True}
    )
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    [images] = [delta["images"] for delta in deltas if "images" in delta]
    [image] = images
    assert np.array_equal(np.asarray(opened(image["image_url"]["url"].split(",")[1])), PIXELS)
    assert "".join(delta.get("content", "") for delta in deltas) == "a circle is round"


@pytest.mark.parametrize(
    ("modalities", "code"),
    [(["audio"], "unsupported_modality"), (["video"], "unsupported_modality"), ([], "invalid_value")],
)
async def test_a_chat_in_other_modalities_is_refused(modalities: list[str], code: str) -> None:
    response, events = await post("/v1/chat/completions", json=QUESTION | {"modalities": modalities})
    assert (response.status_code, response.json()["error"]["code"], events) == (400, code, [])


async def test_a_model_without_images_refuses_them_in_a_chat() -> None:
    response, _ = await post("/v1/chat/completions", json=QUESTION | {"modalities": ["image"]}, served=SERVED)
    assert response.json()["error"]["param"] == "modalities"


# ---- /generate -----------------------------------------------------------------------------------------


async def test_a_line_has_a_whole_image_as_ms_client_reads_it() -> None:
    form = {"text": "a red circle", "output_modalities": "image", "model_kwargs": '{"cfg_text_scale": 3}'}
    response, [event] = await post("/generate", data=form)
    lines = [json.loads(line) for line in response.text.splitlines()]
    images = [one for one in lines if one["modality"] == "image" and "advisory" not in one["metadata"]]
    [image] = images
    assert np.array_equal(np.asarray(opened(image["data"])), PIXELS)
    assert image["metadata"]["content_type"] == "image/png"
    assert event.params.options == {"cfg_text_scale": 3}


async def test_lines_have_the_pieces_if_raw_chunks_are_asked_for() -> None:
    response, _ = await post(
        "/generate", json={"text": "a", "output_modalities": "image", "tensor_format": "raw"}
    )
    lines = [json.loads(line) for line in response.text.splitlines()]
    pieces = [one["metadata"]["piece"] for one in lines if "piece" in one["metadata"]]
    assert pieces[0] == 0
    assert pieces[1:] == list(range(len(pieces) - 1))
    assert len(pieces) > 2
