"""`/generate` with several texts, for models that take them."""

import json
from dataclasses import replace
from typing import Any

from configs.deployment import GatewaySettings
from shared.events import RequestSubmitted
from tests.gateway.texts.test_rerank import RERANKER, count
from tests.gateway.world import deployment


async def test_texts_and_queries_are_a_request() -> None:
    asked = {"texts": ["a", [1, 2]], "queries": ["q"]}
    form = {name: json.dumps(value) for name, value in asked.items()}
    bodies: list[dict[str, Any]] = [{"json": asked}, {"data": form}]
    async with deployment(count, served=RERANKER) as world:
        for body in bodies:
            response = await world.client.post("/generate", **body)
            assert response.status_code == 200, response.text
        events = world.events("request")

    for event in events:
        assert isinstance(event, RequestSubmitted)
        assert (event.inputs.texts, event.inputs.queries) == (asked["texts"], ["q"])
        assert event.inputs.output_modalities == ["score"]


async def test_what_cannot_be_texts_is_refused_by_name() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"texts": "a"}, "texts"),
        ({"texts": ["a"], "text": "b"}, "texts"),
        ({"texts": [5]}, "texts[0]"),
        ({"text": "a", "queries": ["q"]}, "queries"),
        ({"texts": ["a"] * 3}, "texts"),
        ({"texts": ["a"], "model_kwargs": {"max_tokens_per_doc": 0}}, "model_kwargs.max_tokens_per_doc"),
    ]
    served = replace(RERANKER, outputs=("embedding",))
    async with deployment(count, served=served, settings=GatewaySettings(max_embeddings=2)) as world:
        for body, param in refused:
            response = await world.client.post("/generate", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param, response.text
        assert world.events("request") == []
