"""Orpheus, tiny, on one, two and three ranks: the same tokens, and the same sound."""

from typing import Any

import msgspec
import pytest

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models import registry
from models.orpheus.graph import SOUND
from shared.events import OutputChunk, StreamSent, StreamTaken, WalkCall, WalkCompleted, decode
from shared.tensors import inline_ids
from tests.models.orpheus import oracle
from tests.tiny.orpheus import tiny_orpheus
from tests.workers.cluster import Cluster, clustered, until
from workers import settings
from workers.data_plane.port import TensorStore
from workers.kv_engine.counters import EngineStats
from workers.loading.model import LocalModel
from workers.streams.consumer import window_of

pytestmark = pytest.mark.slow


TOKENS = 130
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
GROUPS = [
    NodeGroup(node_names=["LLM"], ranks=[0], graph_walks=["prefill"]),
    NodeGroup(node_names=["LLM"], ranks=[1], graph_walks=["decode"]),
    NodeGroup(node_names=["snac_decoder"], ranks=[2, 1]),
]
CONFIG = DeploymentConfig(
    model="orpheus",
    name="orpheus",
    checkpoint="/set/below",
    max_seq_len=1024,
    kv_tokens=4096,
    node_groups=GROUPS,
    model_kwargs={"device": "cpu", "dtype": "float32", "max_sequences": 8},
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": {"LLM": 1, "snac_decoder": 1}},
    "two ranks": {"ranks": {"LLM": 1, "snac_decoder": 2}},
    "three ranks": {},
}


def spoken(
    prompt: list[int], *, tokens: int = TOKENS, to_the_end: bool = True
) -> tuple[tuple[WalkCall, ...], tuple[WalkCall, ...]]:
    """The walks of the two partitions: SNAC's, and the language model's."""
    args = {"max_tokens": tokens, "sampling": GREEDY, "ignore_eos": not to_the_end}
    prefill = WalkCall(name="prefill", inputs={"token_ids": inline_ids("p", prompt)}, args=args)
    return (WalkCall(name="snac_chunk"),), (prefill, WalkCall(name="decode", args=args))


def speak(cluster: Cluster, request_id: str, prompt: list[int], *, layout: Any = None, **how: Any) -> None:
    listen, think = spoken(prompt, **how)
    cluster.order(request_id, *listen, step=1, partition="speech", **(layout or {}))
    cluster.order(request_id, *think, step=2, ends=["token"], **(layout or {}))


def sound(cluster: Cluster, request_id: str) -> bytes:
    return b"".join(chunk.data or b"" for chunk in cluster.chunks(request_id))


async def test_every_layout_says_the_same_and_sounds_before_the_language_model_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = msgspec.structs.replace(CONFIG, checkpoint=str(tiny_orpheus()))

    def model(rank: int, store: TensorStore) -> LocalModel:
        return LocalModel(used, settings.of(used), rank, store.allocate)

    prompt = oracle.prompt("tara", "How are you today?")
    answer, _ = oracle.generate(prompt, TOKENS)
    assert len(oracle.speech(answer, seed=3)) > 10_000
    async with clustered(registry.graph("orpheus"), used, model, ranks=(0, 1, 2)) as cluster:
        for name, layout in LAYOUTS.items():
            request_id = name.replace(" ", "-")
            speak(cluster, request_id, prompt, layout=layout)
            done = await cluster.until(WalkCompleted, request_id, 3 if name == "three ranks" else 2)

            [told] = [e for e in done if e.results[-1].facts.get("completion_tokens")]
            assert told.results[-1].facts["completion_tokens"] == len(answer), name
            assert sound(cluster, request_id) == oracle.speech(answer, seed=3), name
            assert {chunk.modality for chunk in cluster.chunks(request_id)} == {"audio"}
            metadata = cluster.chunks(request_id)[0].metadata
            assert (metadata["sample_rate"], metadata["dtype"]) == (24_000, "int16")
            assert bool(cluster.events(StreamSent, request_id)) is (name != "one rank")
            await cluster.empty(request_id)

        speak(cluster, "long", prompt, tokens=250, to_the_end=False)
        await cluster.until(WalkCompleted, "long", 3)
        events = [decode(record.data) for record in cluster.server.records]
        mine = [type(event) for event in events if event.request_id == "long"]
        assert mine.index(OutputChunk) < mine.index(WalkCompleted)
        assert mine.count(OutputChunk) > 3
        long = sound(cluster, "long")
        await cluster.empty("long")

        # Nobody takes the tokens: the row is held in the engine, and goes on as soon as somebody does.
        monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 16)
        window = window_of(SOUND.chunks)
        assert window < 200
        listen, think = spoken(prompt, tokens=250, to_the_end=False)
        cluster.order("held", *think, step=2, ends=["token"])
        decoding = cluster.members[1].model
        await until(lambda: (decoding.counters() or EngineStats()).held == 1)

        def sent() -> int:
            return sum(event.items.shape[0] for event in cluster.events(StreamSent, "held") if event.items)

        await until(lambda: sent() > window)  # the last of them wait for their batch
        assert sent() <= window + 40
        cluster.order("held", *listen, step=1, partition="speech")
        await cluster.until(WalkCompleted, "held", 3)
        assert cluster.events(StreamTaken, "held")
        assert sound(cluster, "held") == long
        await cluster.empty("held")
