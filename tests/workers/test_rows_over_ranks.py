"""Prefill on one rank and decode on another, with the real engine, beside the same on one rank."""

from typing import Any

import msgspec
import pytest

from configs.checks import resolve
from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models import registry
from shared.events import NodeFired, OutputChunk, SequenceHandover, TensorsReleased, WalkCall, WalkFailed
from shared.tensors import inline_ids
from tests.tiny import tiny_checkpoint
from tests.workers import harness
from tests.workers.cluster import Cluster, clustered
from workers import settings
from workers.data_plane.port import TensorStore
from workers.loading.model import LocalModel

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
WARM = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
PROMPT = [5, 17, 99, 3, 42, 64, 11, 7, 23, 5, 8]
PREFILL_AND_DECODE = [
    NodeGroup(node_names=["prepare"], ranks=[0]),
    NodeGroup(node_names=["llm"], ranks=[0], graph_walks=["prefill", "score"]),
    NodeGroup(node_names=["llm"], ranks=[1], graph_walks=["decode"]),
]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": WARM},
    "another choice": {"sampling": WARM, "choice": 3},
    "penalties": {"sampling": GREEDY | {"repetition_penalty": 1.3, "min_tokens": 4, "presence_penalty": 0.5}},
    "log probabilities": {"logprobs": 3, "sampling": WARM},
    "an echo": {"echo": "the prompt as text"},
    "an echo with log probabilities": {"echo": "the prompt as text", "logprobs": 2},
    "one token": {"max_tokens": 1},
    "a guide": {"guide": {"regex": "[a-z]{5} [0-9]{4}"}, "sampling": WARM, "ignore_eos": False},
    "a guided token": {"guide": {"choice": ["maybe"]}, "max_tokens": 1},
}


def config() -> DeploymentConfig:
    return msgspec.structs.replace(
        resolve(str(tiny_checkpoint("qwen3"))),
        node_groups=PREFILL_AND_DECODE,
        model_kwargs={"device": "cpu", "max_sequences": 16},
    )


def calls(prompt: list[int], **args: Any) -> tuple[WalkCall, WalkCall]:
    args = {"max_tokens": 16, "sampling": GREEDY, "stop": [], "ignore_eos": True} | args
    prefill = WalkCall(name="prefill", inputs={"token_ids": inline_ids("p", prompt)}, args=args)
    told = {
        name: value for name, value in args.items() if name not in ("logprobs", "echo", "choice", "guide")
    }
    return prefill, WalkCall(name="decode", args=told)


def said(cluster: Cluster, request_id: str) -> list[tuple[Any, ...]]:
    """All that a client sees, and how it was cut where that does not hang on time."""
    chunks = cluster.chunks(request_id)
    return [
        ("text", "".join(chunk.text for chunk in chunks)),
        ("ids", [id for chunk in chunks for id in chunk.token_ids]),
        ("echo", [chunk.metadata for chunk in chunks if chunk.is_echo]),
        ("choice", {chunk.choice for chunk in chunks}),
        (
            "told",
            [
                (told.id, told.token, told.logprob, told.top)
                for chunk in chunks
                for told in chunk.logprobs or []
            ],
        ),
    ]


def rounded(value: Any) -> Any:
    """Other batches round otherwise, in the last places."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, msgspec.Struct):
        return rounded(msgspec.structs.astuple(value))
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


@pytest.mark.slow
async def test_a_row_that_goes_on_elsewhere_says_what_it_says_on_one_rank() -> None:
    used = config()

    def model(rank: int, store: TensorStore) -> LocalModel:
        return LocalModel(used, settings.of(used), rank, store.allocate)

    async with clustered(registry.graph("decoder_lm"), used, model) as cluster:
        for number, args in enumerate(CASES.values()):
            cluster.order(f"one{number}", *calls(PROMPT, **args), ranks={"llm": 1})
            cluster.order(f"two{number}", *calls(PROMPT, **args))
        for number, name in enumerate(CASES):
            one = (await cluster.done(f"one{number}"))[1]
            two = await cluster.done(f"two{number}", 2)
            assert rounded(said(cluster, f"two{number}")) == rounded(said(cluster, f"one{number}")), name
            assert two[1].results[1].facts == one.results[1].facts, name
            assert not two[0].results[0].facts, name
            assert two[0].output.chunks == 0, name
            writers = {chunk.writer for chunk in cluster.chunks(f"two{number}")}
            assert writers == {"w1"}, name
            assert two[1].output.chunks == len(cluster.events(OutputChunk, f"two{number}")), name

        # A stop string that the answer holds, from its second token on: it ends both alike.
        plain = cluster.text("one0")
        for number, stop in enumerate((plain[2:6], plain[:2])):
            cluster.order(f"cut{number}a", *calls(PROMPT, stop=[stop]), ranks={"llm": 1})
            cluster.order(f"cut{number}b", *calls(PROMPT, stop=[stop]))
            one = (await cluster.done(f"cut{number}a"))[1]
            two = await cluster.done(f"cut{number}b", 2)
            assert two[1].results[1].facts == one.results[1].facts
            assert one.results[1].facts["finish_reason"] == "stop"
            assert cluster.text(f"cut{number}b") == cluster.text(f"cut{number}a")

        # A later attempt goes on behind what was released, on both ranks; or has nothing left to do.
        chunks = cluster.chunks("one0")
        for number, released in enumerate((chunks[:2], chunks)):
            request_id = f"again{number}"
            cluster.admit(request_id)
            for chunk in released:
                earlier = msgspec.structs.replace(chunk, request_id=request_id, id=f"{request_id}.{chunk.id}")
                cluster.put(f"ds.output.g-1.{request_id}.w1", earlier)
            cluster.put(f"ds.output.g-1.{request_id}.conductor", harness.fence(request_id, 2))
            cluster.order(request_id, *calls(PROMPT), attempt=2)
            done = await cluster.done(request_id, 2, attempt=2)
            assert said(cluster, request_id) == said(cluster, "one0")
            assert done[1].results[1].facts == {"completion_tokens": 16, "finish_reason": "length"}
            fired = [event for event in cluster.events(NodeFired, request_id) if event.walk == 0]
            assert [event.row is not None for event in fired] == [number == 0]

        await cluster.until(TensorsReleased, "two0")
        fired = cluster.events(NodeFired, "two0")
        assert [(event.node, event.walk, event.row is not None) for event in fired] == [
            ("llm", 0, True),
            ("llm", 1, False),
        ]
        assert not cluster.events(NodeFired, "one0")
        await cluster.empty(*[f"two{number}" for number in range(len(CASES))], "cut0b", "cut1b", "again0")

        # A token program does not go on elsewhere.
        cluster.order("program", *calls(PROMPT, token_program="fill"))
        [refused] = await cluster.until(WalkFailed, "program")
        assert refused.failure.code == "token_program_handed_over"
        assert "place its walks on one rank" in refused.failure.message

        # Keys and values that are gone when the other rank wants them: it says whose they were.
        key = "lost/1/0/prefill/llm/kv"
        handle, _ = cluster.members[0].store.allocate(key, "float32", (1, 2, 11, 1, 8), scope="lost/1/0")
        cluster.members[0].store.end("lost/1/0")
        cluster.order("lost", *calls(PROMPT), only=[1])
        told = NodeFired(
            id="lost.fired",
            writer="w0",
            request_id="lost",
            attempt=1,
            incarnation=cluster.members[0].life,
            walk=0,
            node="llm",
            path=(),
            outputs={"token": inline_ids("t", [5])},
            row=SequenceHandover(kv=handle, token_ids=[5]),
        )
        cluster.put("ds.edge.1.0.lost", told)
        [failed] = await cluster.until(WalkFailed, "lost")
        assert (failed.failure.code, failed.gone) == ("tensor_gone", key)
        await cluster.empty("lost")
