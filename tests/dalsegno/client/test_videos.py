"""Videos by the client, over HTTP and over NATS, and by `dalsegno ask --out film.mp4`."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno import AsyncClient, ClientError
from dalsegno.ask.command import ask
from dalsegno.client.answer import Answer
from dalsegno.client.videos import video_of
from tests.dalsegno.client.test_nats_transport import stage
from tests.gateway.videos.filming import DIRECTOR, film, shoot
from tests.gateway.world import deployment, listening


async def test_a_video_is_made_over_nats() -> None:
    async with stage(shoot) as (it, client):
        made = await client.generate_video("a kite", size="64x48", seconds=1.5, options={"fps": 8})
        [event] = it.submitted

    assert (made.extension, made.data) == ("mp4", film())
    assert event.params.options == {"fps": 8, "seconds": 1.5, "width": 64, "height": 48}
    assert event.inputs.output_modalities == ["video"]


@pytest.mark.processes
async def test_ask_saves_a_video_with_its_progress(tmp_path: Path) -> None:
    out = tmp_path / "film.mp4"
    async with (
        deployment(shoot, served=DIRECTOR) as world,
        listening(world) as url,
        AsyncClient(url) as client,
    ):
        made = await client.generate_video("a kite")
        command = ["a kite", "--out", str(out), "--seconds", "2", "--url", url]
        result = await asyncio.to_thread(CliRunner().invoke, ask, command)
        [_, event] = world.events("request")

    assert made.data == out.read_bytes() == film()
    assert result.stdout == f"{out}\n"
    assert "step 1 of 4, 2 steps/s, 2 s left" in result.stderr
    assert event.params.options == {"seconds": 2.0}  # type: ignore[attr-defined]


def test_an_answer_without_a_video_is_an_error() -> None:
    with pytest.raises(ClientError, match="the answer has no video"):
        video_of(Answer("r"))
