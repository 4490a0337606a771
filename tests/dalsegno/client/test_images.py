"""Images by the client, over HTTP and over NATS."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dalsegno import AsyncClient, ClientError
from dalsegno.client.answer import Answer
from dalsegno.client.images import image_of
from models.media.encoders import encode_image
from tests.dalsegno.client.test_nats_transport import stage
from tests.gateway.images.test_routes import PAINTER, PIXELS, draw
from tests.gateway.world import deployment, listening


@asynccontextmanager
async def over(transport: str) -> AsyncIterator[tuple[AsyncClient, Any]]:
    """A client, and a function that returns the requests on the log."""
    if transport == "nats":
        async with stage(draw) as (it, client):
            yield client, lambda: it.submitted
        return
    async with deployment(draw, served=PAINTER) as world, listening(world) as url, AsyncClient(url) as client:
        yield client, lambda: world.events("request")


@pytest.mark.parametrize("transport", ["nats", pytest.param("http", marks=pytest.mark.processes)])
async def test_an_image_is_drawn_and_changed(transport: str) -> None:
    png = ("in.png", encode_image(PIXELS).tobytes())
    async with over(transport) as (client, submitted):
        drawn = await client.generate_image(
            "a circle", size="64x48", options={"output_format": "webp"}, seed=1
        )
        edited = await client.edit_image("blue", png, options={"num_timesteps": 9})
        first, second = submitted()

    assert (drawn.extension, Image.open(io.BytesIO(drawn.data)).size) == ("webp", (56, 40))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(edited.data))), PIXELS)
    assert first.params.options == {"output_format": "webp", "width": 64, "height": 48}
    assert first.inputs.output_modalities == second.inputs.output_modalities == ["image"]
    assert second.inputs.input_modalities == ["image", "text"]
    assert second.params.options == {"num_timesteps": 9}


async def test_a_size_that_is_none_and_an_answer_without_an_image_are_errors() -> None:
    with pytest.raises(ClientError, match="size: expected WIDTHxHEIGHT such as 1024x1024, found 'big'"):
        await AsyncClient("http://127.0.0.1:9").generate_image("a circle", size="big")
    with pytest.raises(ClientError, match="the answer has no image"):
        image_of(Answer("r"))
