"""A thinker whose states feed a talker, on one rank and two: the codes of transformers, also after a kill."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models import registry
from shared.events import NodeReady, OutputChunk, StreamSent, WalkCall, WalkCompleted
from shared.tensors import inline_ids
from tests.tiny import talk
from tests.tiny.talking import graph, nodes, processing
from tests.tiny.talking.processing import prompt_of, spoken_prompt_of
from tests.workers.cluster import Cluster, clustered, until
from tests.workers.harness import SUBJECTS, fence
from workers import settings
from workers.data_plane.port import TensorStore
from workers.kv_engine.counters import EngineStats
from workers.loading import device_share
from workers.loading.model import LocalModel

TOKENS, FRAMES = talk.TOKENS, talk.FRAMES
TEXTS = talk.TEXTS
TOGETHER = {"thinker": 0, "talker": 0, "codec": 0}
APART = {"thinker": 0, "talker": 1, "codec": 1}


@pytest.fixture(autouse=True)
def _talking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family, as if it were installed."""
    modules = {"graph": graph, "nodes": nodes, "processing": processing}
    real_module, real_graph = registry.module, registry.graph

    def module(family: str, name: str) -> object:
        return modules[name] if family == "talking" else real_module(family, name)

    monkeypatch.setattr(registry, "module", module)
    monkeypatch.setattr(registry, "graph", lambda f: graph.GRAPH if f == "talking" else real_graph(f))


@asynccontextmanager
async def talking() -> AsyncIterator[Cluster]:
    """Two ranks, each with all nodes."""
    names = ["prepare", "thinker", "talker", "codec"]
    config = DeploymentConfig(
        model="talking",
        name="talking",
        checkpoint=str(talk.tiny_talker()),
        max_seq_len=256,
        kv_tokens=1024,
        node_groups=[NodeGroup(node_names=names, ranks=[0, 1])],
        model_kwargs={"device": "cpu", "dtype": "float32", "max_sequences": 8},
    )

    def model(rank: int, store: TensorStore) -> LocalModel:
        return LocalModel(config, settings.of(config), rank, store.allocate)

    assert device_share.of(config, 0).kv_pools == 4, "two on each rank, in one machine's memory"
    async with clustered(graph.GRAPH, config, model) as cluster:
        yield cluster


def order(
    cluster: Cluster,
    name: str,
    text: str,
    layout: dict[str, int],
    *,
    attempt: int = 1,
    parts: str = "sound talk think",
) -> list[NodeReady]:
    """Order an answer, or parts of it."""
    prompt = prompt_of(text)
    talk_args = {
        "max_tokens": FRAMES,
        "ignore_eos": True,
        "stop_token_ids": [graph.CODEC_END],
        "prompt_items": len(prompt) + 1,
    }
    think_args = {"max_tokens": TOKENS}
    spoken = inline_ids("s", spoken_prompt_of(prompt))
    steps = {
        "sound": ((WalkCall(name="sound"),), ()),
        "talk": ((WalkCall(name="talk", inputs={"token_ids": spoken}, args=talk_args),), ("codes",)),
        "think": (
            (
                WalkCall(name="prefill", inputs={"token_ids": inline_ids("p", prompt)}, args=think_args),
                WalkCall(name="decode", args=think_args),
            ),
            ("states",),
        ),
    }
    orders: list[NodeReady] = []
    for number, part in enumerate(steps, 1):
        if part in parts:
            calls, ends = steps[part]
            partition = "" if part == "think" else part
            orders += cluster.order(
                name, *calls, step=number, attempt=attempt, ends=ends, partition=partition, ranks=layout
            )
    return orders


def released(cluster: Cluster, name: str, modality: str) -> bytes:
    """The released values of a modality: later attempts go on after them."""
    chunks = [chunk for chunk in cluster.chunks(name) if chunk.modality == modality]
    by_index = {(chunk.track, chunk.index): chunk for chunk in chunks}
    return b"".join(chunk.data or chunk.text.encode() for chunk in by_index.values())


def check(cluster: Cluster, name: str, text: str) -> None:
    wanted = talk.spoken(tuple(prompt_of(text)), tokens=TOKENS, frames=FRAMES)
    codes = np.frombuffer(released(cluster, name, "codes"), "<i4").reshape(-1, 4)
    sound = np.frombuffer(released(cluster, name, "audio"), "<f4").copy()
    told = released(cluster, name, "text").split()
    assert [int(token) for token in told] == wanted.token_ids, name
    assert codes.tolist() == wanted.codes.tolist(), name
    torch.testing.assert_close(torch.from_numpy(sound), wanted.sound.detach(), atol=1e-6, rtol=1e-3)


async def test_codes_are_those_of_transformers_on_one_rank_and_on_two() -> None:
    async with talking() as cluster:
        for layout, kind in ((TOGETHER, "together"), (APART, "apart")):
            order(cluster, f"{kind}-alone", TEXTS[2], layout)
            await cluster.until(WalkCompleted, f"{kind}-alone", 3)
            check(cluster, f"{kind}-alone", TEXTS[2])
            for number, text in enumerate(TEXTS):
                order(cluster, f"{kind}-{number}", text, layout)
                if number == 1:  # the others come while these are under way
                    await cluster.until(OutputChunk, f"{kind}-0", 2)
            for number, text in enumerate(TEXTS):
                done = await cluster.until(WalkCompleted, f"{kind}-{number}", 3)
                check(cluster, f"{kind}-{number}", text)
                [heard] = [one.streams["states"] for one in done if "states" in one.streams]
                assert heard.items == len(prompt_of(text)) + TOKENS - 1
            assert bool(cluster.events(StreamSent)) is (kind == "apart")
            await cluster.empty(f"{kind}-alone", *(f"{kind}-{number}" for number in range(len(TEXTS))))


async def test_a_talker_waits_for_its_items_and_a_thinker_for_its_talker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 4)
    async with talking() as cluster:
        thinking, speaking = cluster.members[0].model, cluster.members[1].model
        order(cluster, "full", TEXTS[2], APART, parts="think")
        await until(lambda: (thinking.counters() or EngineStats()).held == 1)
        order(cluster, "other", TEXTS[0], APART)
        await cluster.until(WalkCompleted, "other", 3)
        check(cluster, "other", TEXTS[0])

        order(cluster, "full", TEXTS[2], APART, parts="talk sound")
        await cluster.until(WalkCompleted, "full", 3)
        check(cluster, "full", TEXTS[2])
        order(cluster, "waits", TEXTS[1], APART, parts="talk sound")
        order(cluster, "waits", TEXTS[1], APART, parts="think")
        await cluster.until(WalkCompleted, "waits", 3)
        check(cluster, "waits", TEXTS[1])
        assert (speaking.counters() or EngineStats()).running == 0

        left = order(cluster, "left", TEXTS[2], APART, parts="think")
        await until(lambda: (thinking.counters() or EngineStats()).held == 1)
        cluster.stop([*left, *order(cluster, "left", TEXTS[2], APART, parts="talk")])
        await until(lambda: not cluster.held)


async def test_streams_start_again_after_a_kill_and_what_was_released_stands() -> None:
    text = TEXTS[1]
    async with talking() as cluster:
        order(cluster, "killed", text, APART)
        await cluster.until(WalkCompleted, "killed", 1)  # the text is told whole, its speech is not
        await cluster.members[1].die()
        await cluster.join(1)
        cluster.put(SUBJECTS.output("g-1", "killed", "conductor"), fence("killed", 2))
        order(cluster, "killed", text, APART, attempt=2)
        await cluster.until(WalkCompleted, "killed", 3, attempt=2)
        check(cluster, "killed", text)
