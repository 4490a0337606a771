"""`/v1/embeddings`, with OpenAI's own client and without; other tests check the numbers."""

from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from configs.deployment import GatewaySettings
from shared.events import Failure, Inputs, RequestSubmitted
from tests.gateway.openai.test_routes import openai_client
from tests.gateway.world import SERVED, Performance, deployment, listening

NUMBERS = [0.5, -0.25, 1 / 3]


async def embed(performance: Performance) -> None:
    """The embedding of a text of n characters begins with n."""
    inputs = performance.event.inputs
    performance.vector([len(inputs.text or inputs.token_ids or ""), *NUMBERS])
    performance.finish()


def asked(world: Any) -> list[RequestSubmitted]:
    found = world.events("request")
    assert all(isinstance(event, RequestSubmitted) for event in found)
    return list(found)


@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["float", "base64", openai.NOT_GIVEN])
async def test_a_list_of_texts_in_its_order(encoding: Any) -> None:
    is_strict = encoding == "float"  # the client's types have no base64, though it requests it itself
    async with (
        deployment(embed) as world,
        listening(world) as url,
        openai_client(url, is_strict=is_strict) as client,
    ):
        answer = await client.embeddings.create(
            model="demo", input=["one", "three"], encoding_format=encoding, user="me"
        )

    assert (answer.object, answer.model) == ("list", "demo")
    assert [one.index for one in answer.data] == [0, 1]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (14, 14)
    for found, length in zip(answer.data, (3, 5), strict=True):
        numbers: Any = found.embedding
        if encoding == "base64":
            numbers = np.frombuffer(b64decode(numbers), "<f4")
        assert np.array_equal(np.array(numbers, np.float32), np.array([length, *NUMBERS], np.float32))


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("hi", [Inputs(text="hi", chat=False, output_modalities=["embedding"])]),
        (["hi"], [Inputs(text="hi", chat=False, output_modalities=["embedding"])]),
        ([4, 5], [Inputs(token_ids=[4, 5], chat=False, output_modalities=["embedding"])]),
        (
            [[4], [5, 6]],
            [
                Inputs(token_ids=[4], chat=False, output_modalities=["embedding"]),
                Inputs(token_ids=[5, 6], chat=False, output_modalities=["embedding"]),
            ],
        ),
    ],
)
async def test_what_may_be_given_is_a_request_for_each_embedding(given: Any, inputs: list[Inputs]) -> None:
    async with deployment(embed) as world:
        response = await world.client.post(
            "/v1/embeddings", json={"model": "demo", "input": given, "dimensions": 2, "request_id": "mine"}
        )

        assert response.status_code == 200, response.text
        events = asked(world)
    assert [event.inputs for event in events] == inputs
    assert {event.params.dimensions for event in events} == {2}
    assert [event.request_id for event in events] == ["mine", "mine-1"][: len(inputs)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": [-1]}, "input", "invalid_value"),
        ({"input": ["a", 5]}, "input", "invalid_value"),
        ({"input": {"a": 1}}, "input", "invalid_value"),
        ({"input": ["a"] * 4}, "input", "invalid_value"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"model": None}, "model", "invalid_value"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(
    changed: dict[str, Any], param: str, code: str
) -> None:
    async with deployment(embed, settings=GatewaySettings(max_embeddings=3)) as world:
        body = {"model": "demo", "input": "x", **changed}
        response = await world.client.post("/v1/embeddings", json=body)

        assert response.status_code == 400
        assert world.events("request") == []
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error


@pytest.mark.processes
async def test_one_that_cannot_be_made_fails_the_whole() -> None:
    async def refused(performance: Performance) -> None:
        performance.fail(Failure(code="dimensions_not_supported", message="dimensions: no", status=400))

    async with deployment(refused) as world, listening(world) as url, openai_client(url) as client:
        with pytest.raises(openai.BadRequestError) as error:
            await client.embeddings.create(model="demo", input=["a", "b"], dimensions=7)
    assert error.value.code == "dimensions_not_supported"


async def test_a_model_that_makes_none_says_so() -> None:
    speaker = replace(SERVED, outputs=("audio",))
    async with deployment(embed, served=speaker) as world:
        response = await world.client.post("/v1/embeddings", json={"model": "demo", "input": "x"})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_modality"
