"""Several texts by the client, over HTTP and over NATS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dalsegno import AsyncClient, Client, ClientError
from dalsegno.client import Ranked
from shared.events import RequestSubmitted
from tests.dalsegno.client.test_nats_transport import stage
from tests.gateway.media.world import png
from tests.gateway.texts.test_rerank import RERANKER
from tests.gateway.world import Performance, deployment, listening

PNG = png()
SERVED = replace(RERANKER, outputs=("embedding", "score"), modalities=("text", "image"))


async def answer(performance: Performance) -> None:
    """The embedding of a text of n characters is [n, 1], its score the difference to its query's length."""
    inputs = performance.event.inputs
    sizes = [len(one) for one in inputs.texts or []] + [file.size for file in inputs.files]
    [modality] = inputs.output_modalities
    rows = np.array([[size, 1] for size in sizes], "<f4")
    if modality == "score":
        queries = inputs.queries * (len(sizes) if len(inputs.queries) == 1 else 1)
        rows = np.array([size - len(query) for size, query in zip(sizes, queries, strict=True)], "<f4")
    performance.value(modality, rows.tobytes(), {"dtype": "float32", "shape": list(rows.shape)})
    performance.finish()


@asynccontextmanager
async def over(transport: str) -> AsyncIterator[tuple[AsyncClient, Any]]:
    """A client, and a function that returns the requests on the log."""
    if transport == "nats":
        async with stage(answer) as (it, client):
            yield client, lambda: it.submitted
        return
    async with (
        deployment(answer, served=SERVED) as world,
        listening(world) as url,
        AsyncClient(url) as client,
    ):
        yield client, lambda: world.events("request")


@pytest.mark.parametrize("transport", ["nats", pytest.param("http", marks=pytest.mark.processes)])
async def test_embeddings_and_scores_of_several_texts(transport: str) -> None:
    async with over(transport) as (client, submitted):
        vectors = await client.embed_all(["a", "bcd"], images=[("cat.png", PNG)], truncate_prompt_tokens=7)
        scores = await client.score("q", ["ab", "abc"])
        pairs = await client.score(["q", "qqq"], ["ab", "abc"])
        best = await client.rerank("q", ["a", "abc", "ab"], top_n=2, max_tokens_per_doc=5)
        events = submitted()

    assert vectors == [[1, 1], [3, 1], [len(PNG), 1]]
    assert (scores, pairs) == ([1, 2], [1, 0])
    assert best == [Ranked(index=1, score=2, document="abc"), Ranked(index=2, score=1, document="ab")]
    assert all(isinstance(event, RequestSubmitted) for event in events)
    assert events[0].params.truncate_prompt_tokens == 7
    assert (events[3].params.max_tokens_per_doc, events[3].inputs.queries) == (5, ["q"])


async def test_queries_without_texts_are_refused_before_they_are_sent() -> None:
    async with stage(answer) as (it, client):
        with pytest.raises(ClientError, match="queries: expected none without texts"):
            await client.generate("a", queries=["q"])
        assert it.submitted == []


@pytest.mark.processes
async def test_the_synchronous_client_has_the_same_calls() -> None:
    def ask(url: str) -> tuple[list[list[float]], list[float], list[Ranked]]:
        with Client(url) as client:
            return client.embed_all(["a"]), client.score("q", ["ab"]), client.rerank("q", ["ab"])

    async with deployment(answer, served=SERVED) as world, listening(world) as url:
        found = await asyncio.to_thread(ask, url)
    assert found == ([[1, 1]], [1], [Ranked(index=0, score=1, document="ab")])
