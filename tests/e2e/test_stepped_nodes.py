"""A denoiser that runs in steps: pictures of several requests at once, and one that outlives its worker.

Each picture is compared with an oracle, which takes its steps one by one.
"""

import asyncio
import base64
import json
import os
import signal
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch
import yaml

from shared.events import NodeReady, OutputChunk
from shared.tensors import read_ids
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint
from tests.tiny.families import installed
from tests.tiny.stepping.nodes import CHECKPOINT_STEPS, embedded, moved

SIZES: Final = (6, 6, 9, 6, 9)
CALLS: Final = sum(12 + number for number in range(len(SIZES)))
LONG: Final = 800
"""Steps of a picture that lasts long enough to be killed after `KILLED` of them."""
KILLED: Final = 200


async def paint(client: httpx.AsyncClient, request_id: str, **options: Any) -> torch.Tensor:
    """Ask for a picture: (size,)."""
    answer = await client.post("/generate", json=clients.body("paint a cat", request_id, **options))
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    picture, end = (line for line in lines if not line["metadata"].get("advisory"))
    assert end["metadata"]["finish_reason"] == "stop"
    return torch.from_numpy(np.frombuffer(base64.b64decode(picture["data"]), "<f4").copy())


async def expected(reader: clients.Reader, request_id: str, *, less: int = 0) -> torch.Tensor:
    """The picture by the oracle, with the order that the log holds, and so many steps less."""
    orders = [event for event in await reader.events(request_id) if isinstance(event, NodeReady)]
    order = next(order for order in orders if order.walks[0].name == "paint")
    call = order.walks[0]
    noise = torch.Generator().manual_seed(order.seed % 2**63)
    text = embedded(torch.tensor(list(read_ids(call.inputs["token_ids"]))))
    latents = torch.randn(call.args["size"], generator=noise)
    for _ in range(call.args["steps"] - less):
        latents = moved(latents[None], text[None])[0] + 0.1 * torch.randn(len(latents), generator=noise)
    return latents.sigmoid()


def progress_of(chunk: OutputChunk) -> dict[str, Any]:
    """What a chunk tells of progress; nothing for another chunk."""
    return dict(chunk.metadata.get("progress", {}))


async def kill_after(running: Running, reader: clients.Reader, request_id: str, step: int) -> None:
    """Kill the worker when a request's picture has got so far."""
    output = reader.subjects.outputs_of(request_id)
    await reader.until(output, OutputChunk, lambda chunk: progress_of(chunk).get("step", 0) >= step)
    pid = running.pids.worker["0"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_pictures_in_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("stepping")
    config, environment = folder / "stepping.yaml", installed("stepping", folder)
    groups = [{"node_names": ["prepare", "denoiser", "decoder"], "ranks": [0]}]
    settings = {
        "model": "stepping",
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 512,
        "node_groups": groups,
    }
    config.write_text(yaml.safe_dump(settings))
    with deploy.serve(folder, model=str(config), env=environment) as running:
        await several_at_once(running)
        await one_outlives_its_worker(running)
        for how in ([], ["--execute", "--config", str(config)]):
            ended = clients.run_on(running, "replay", "killed", *how, env=environment)
            assert ended.returncode == 0, ended.stdout


async def several_at_once(running: Running) -> None:
    """Each picture is that of the oracle, with others of its size and of another one under way."""
    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        pictures = [
            tasks.create_task(paint(client, f"picture-{number}", steps=12 + number, size=size))
            for number, size in enumerate(SIZES)
        ]
    async with clients.reader(running) as reader:
        for number, picture in enumerate(pictures):
            wanted = await expected(reader, f"picture-{number}")
            torch.testing.assert_close(picture.result(), wanted, atol=1e-4, rtol=1e-4)
        beat = reader.subjects.heartbeat("worker", "0")
        await reader.said(beat, lambda beat: beat["meters"]["stepped"]["denoiser"]["calls"]["sum"] == CALLS)
        short = await expected(reader, "picture-0", less=1)
        assert float((pictures[0].result() - short).abs().max()) > 0.02, "the control: a step less would show"


async def one_outlives_its_worker(running: Running) -> None:
    """The second attempt goes on after a checkpoint, and gives the same picture."""
    async with clients.http(running) as client, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            picture = tasks.create_task(paint(client, "killed", steps=LONG))
            await kill_after(running, reader, "killed", KILLED)
            assert not picture.done()
        chunks = [one for one in await reader.events("killed") if isinstance(one, OutputChunk)]
        wanted = await expected(reader, "killed")
    torch.testing.assert_close(picture.result(), wanted, atol=1e-3, rtol=1e-3)
    told = {attempt: [progress_of(one) for one in chunks if one.attempt == attempt] for attempt in (1, 2)}
    steps = [one["step"] for one in told[2] if one]
    assert min(steps) >= KILLED, f"the second attempt went on after a checkpoint: {told}"
    assert max(steps) == LONG - CHECKPOINT_STEPS
    assert any(one.get("steps_per_s", 0) > 0 and one.get("remaining_s", -1) >= 0 for one in told[2])
