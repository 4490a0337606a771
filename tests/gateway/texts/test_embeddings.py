"""`/v1/embeddings`, with OpenAI's own client and without; other tests check the numbers."""

from base64 import b64decode, b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from configs.deployment import GatewaySettings
from gateway.served_model import ServedModel
from shared.events import Failure, Inputs, RequestSubmitted
from tests.gateway.media.world import data_url, png
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
async def test_embeddings_come_in_the_order_of_the_texts(encoding: Any) -> None:
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


# ---- models that take several texts ------------------------------------------------------------------------

SMALL, LARGE = png(), png(comment=b"a cat")
ENCODER = replace(SERVED, outputs=("embedding",), takes_texts=True)
SEES = replace(ENCODER, modalities=("text", "image"))


async def embed_all(performance: Performance) -> None:
    """The embedding of the text or image k of a request is [k, its length or size]."""
    inputs = performance.event.inputs
    sizes = [len(one) for one in inputs.texts or []] + [file.size for file in inputs.files]
    rows = np.array([[number, size] for number, size in enumerate(sizes)], "<f4")
    performance.value("embedding", rows.tobytes(), {"dtype": "float32", "shape": list(rows.shape)})
    performance.finish()


async def embeddings_of(body: dict[str, Any], served: ServedModel = ENCODER, script: Any = embed_all) -> Any:
    """The body of the answer, and the requests on the log."""
    async with deployment(script, served=served) as world:
        response = await world.client.post("/v1/embeddings", json={"model": "demo", **body})
        return response.json(), asked(world)


def vectors(found: Any) -> list[Any]:
    assert [one["index"] for one in found["data"]] == list(range(len(found["data"])))
    return [one["embedding"] for one in found["data"]]


async def test_all_texts_are_one_request() -> None:
    found, [event] = await embeddings_of({"input": ["one", [7, 8], {"text": "three"}]})

    assert event.inputs.texts == ["one", [7, 8], "three"]
    assert event.inputs.output_modalities == ["embedding"]
    assert vectors(found) == [[0, 3], [1, 2], [2, 5]]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


async def test_images_stand_among_texts() -> None:
    found, [event] = await embeddings_of(
        {"input": [{"image": data_url(SMALL)}, "ab", {"image": b64encode(LARGE).decode()}]}, SEES
    )

    assert (event.inputs.texts, event.inputs.input_modalities) == (["ab"], ["image", "text"])
    sizes = [len(SMALL), 2, len(LARGE)]
    assert vectors(found) == [[1, sizes[0]], [0, sizes[1]], [2, sizes[2]]]


async def test_an_image_alone_is_embedded() -> None:
    found, [event] = await embeddings_of({"input": {"image": data_url(SMALL)}}, SEES)
    assert (event.inputs.texts, len(event.inputs.files)) == ([], 1)
    assert event.inputs.input_modalities == ["image"]
    assert vectors(found) == [[0, len(SMALL)]]


async def test_large_texts_are_several_requests_with_one_answer() -> None:
    texts = ["a" * 200_000, "b" * 200_001, "c" * 3]
    found, events = await embeddings_of({"input": texts})
    assert sorted(len(event.inputs.texts or []) for event in events) == [1, 2]
    assert [size for _, size in vectors(found)] == [200_000, 200_001, 3]
    assert found["usage"]["prompt_tokens"] == 14


@pytest.mark.parametrize("name", ["encoding_format", "embedding_type", "output_dtype", "embedding_types"])
async def test_encodings_have_the_names_of_other_servers(name: str) -> None:
    wanted: Any = ["int8"] if name == "embedding_types" else "int8"
    found, _ = await embeddings_of({"input": ["abc", "ab"], name: wanted})
    assert vectors(found) == [[0, 127], [64, 127]]


async def test_parameters_reach_the_event() -> None:
    _, [event] = await embeddings_of(
        {"input": "a", "output_dimension": 1, "truncate_prompt_tokens": 5, "truncation_side": "left"}
    )
    params = event.params
    assert (params.dimensions, params.truncate_prompt_tokens, params.truncation_side) == (1, 5, "left")
    _, [event] = await embeddings_of({"input": "a", "truncate": True})
    assert (event.params.truncate_prompt_tokens, event.params.truncation_side) == (-1, None)
    _, [event] = await embeddings_of({"input": "a", "truncate": "START"})
    assert (event.params.truncate_prompt_tokens, event.params.truncation_side) == (-1, "left")


async def test_the_vectors_of_a_multi_vector_model_are_grouped_by_text() -> None:
    async def embed_tokens(performance: Performance) -> None:
        rows = np.arange(8, dtype="<f4").reshape(4, 2)
        half = rows.nbytes // 2
        for number, data in enumerate((rows.tobytes()[:half], rows.tobytes()[half:])):
            place = {"tensor": "encoder.embedding", "piece": number, "pieces": 2}
            performance.value("embedding", data, {"shape": [4, 2], **place})
        performance.value("vectors", np.array([1, 3], "<i4").tobytes(), {"shape": [2]})
        performance.finish()

    found, _ = await embeddings_of({"input": ["a", "b c d"]}, script=embed_tokens)
    assert vectors(found) == [[[0, 1]], [[2, 3], [4, 5], [6, 7]]]


async def test_an_error_names_the_text_in_the_body() -> None:
    async def refused(performance: Performance) -> None:
        message = "texts[1]: expected at most 8 tokens, found 9"
        performance.fail(Failure(code="context_length_exceeded", message=message, status=400))

    found, _ = await embeddings_of({"input": ["a", "b"]}, script=refused)
    assert found["error"]["param"] == "input[1]"
    assert found["error"]["message"].startswith("input[1]: ")


async def test_rows_that_do_not_fit_the_texts_are_an_error_of_the_server() -> None:
    async def embed_one(performance: Performance) -> None:
        performance.vector([1.0, 2.0])
        performance.finish()

    found, _ = await embeddings_of({"input": ["a", "b"]}, script=embed_one)
    assert found["error"]["code"] == "unexpected_output"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [{"image": "data:image/png;base64,AAAA"}]}, "input[0].image", "unsupported_modality"),
    ({"input": [{"text": "a", "image": "x"}]}, "input", "invalid_value"),
    ({"input": [{"text": "a", "title": "x"}]}, "input", "invalid_value"),
    ({"input": [{"text": 5}]}, "input", "invalid_value"),
    ({"input": [[1, "a"]]}, "input", "invalid_value"),
    ({"encoding_format": "int8", "embedding_type": "binary"}, "embedding_type", "invalid_value"),
    ({"embedding_types": ["int8", "float"]}, "embedding_types", "invalid_value"),
    ({"truncate": False}, "truncate", "not_supported"),
    ({"truncate": "END", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens", "invalid_value"),
    ({"quantization_ranges": [[0], [1]]}, "quantization_ranges", "invalid_value"),
    (
        {"quantization_ranges": [[0], [1]], "encoding_format": "int8"},
        "quantization_ranges",
        "invalid_value",
    ),
    ({"late_chunking": True}, "late_chunking", "not_supported"),
    ({"dimension": 5}, "dimension", "unknown_parameter"),
]


async def test_what_an_encoder_cannot_do_is_refused_by_name() -> None:
    async with deployment(embed_all, served=ENCODER) as world:
        for changed, param, code in REFUSED:
            body = {"model": "demo", "input": "abc", **changed}
            error = (await world.client.post("/v1/embeddings", json=body)).json()["error"]
            assert (error["param"], error["code"]) == (param, code), error


async def test_a_decoder_that_sees_refuses_images_to_embed() -> None:
    served = replace(SERVED, modalities=("text", "image"))
    found, events = await embeddings_of({"input": [{"image": data_url(SMALL)}]}, served)
    assert (found["error"]["code"], events) == ("unsupported_modality", [])
