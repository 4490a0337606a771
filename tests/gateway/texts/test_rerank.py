"""`/v1/rerank` and `/v1/score`: the bodies of Cohere, Jina and vLLM, with scripted scores."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from configs.deployment import GatewaySettings
from gateway.served_model import ServedModel
from shared.events import Failure, RequestSubmitted
from tests.gateway.media.world import data_url, png
from tests.gateway.world import SERVED, Performance, deployment

RERANKER = replace(SERVED, outputs=("score",), takes_texts=True)
ENCODER = replace(SERVED, outputs=("embedding",), takes_texts=True)
BODY = {"model": "demo", "query": "cats", "documents": ["a dog", "three cats", "a cat"]}


async def count(performance: Performance) -> None:
    """The score of a document is its length, plus a thousandth of its query's."""
    inputs = performance.event.inputs
    entries = [len(one) for one in inputs.texts or []] + [file.size for file in inputs.files]
    queries = inputs.queries * (len(entries) if len(inputs.queries) == 1 else 1)
    scores = np.array([len(q) / 1000 + n for q, n in zip(queries, entries, strict=True)], "<f4")
    performance.value("score", scores.tobytes(), {"dtype": "float32", "shape": [len(scores)]})
    performance.finish()


async def point(performance: Performance) -> None:
    """The embedding of a text of n characters is [1, n]."""
    rows = np.array([[1, len(one)] for one in performance.event.inputs.texts or []], "<f4")
    performance.value("embedding", rows.tobytes(), {"dtype": "float32", "shape": list(rows.shape)})
    performance.finish()


async def asked(
    path: str,
    body: dict[str, Any],
    *,
    served: ServedModel = RERANKER,
    script: Any = count,
    settings: GatewaySettings | None = None,
) -> tuple[Any, list[RequestSubmitted]]:
    """The body of the answer, and the requests on the log."""
    async with deployment(script, served=served, settings=settings or GatewaySettings()) as world:
        response = await world.client.post(path, json=body)
        events: Any = world.events("request")
        return response.json(), events


async def test_documents_come_sorted_with_their_index() -> None:
    found, [event] = await asked("/v1/rerank", BODY)

    assert (event.inputs.texts, event.inputs.queries) == (BODY["documents"], ["cats"])
    assert event.inputs.output_modalities == ["score"]
    assert [one["index"] for one in found["results"]] == [1, 0, 2]
    assert [one["document"] for one in found["results"]] == [
        {"text": "three cats"},
        {"text": "a dog"},
        {"text": "a cat"},
    ]
    assert found["results"][0]["relevance_score"] == pytest.approx(10.004)
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert found["meta"]["tokens"] == {"input_tokens": 7, "output_tokens": 0}
    assert (found["id"], found["model"]) == (event.request_id, "demo")


@pytest.mark.parametrize(
    ("path", "given", "returned"),
    [
        ("/v1/rerank", {}, True),
        ("/rerank", {}, True),
        ("/v2/rerank", {}, False),
        ("/v2/rerank", {"return_documents": True}, True),
        ("/v1/rerank", {"return_documents": False}, False),
    ],
)
async def test_documents_are_returned_as_the_path_or_the_request_says(
    path: str, given: dict[str, Any], returned: bool
) -> None:
    found, _ = await asked(path, BODY | given)
    assert ["document" in one for one in found["results"]] == [returned] * 3


@pytest.mark.parametrize(
    ("given", "count_"), [({"top_n": 2}, 2), ({"top_k": 1}, 1), ({"top_n": 9}, 3), ({"top_n": 0}, 3)]
)
async def test_top_n_leaves_the_best_documents(given: dict[str, Any], count_: int) -> None:
    found, _ = await asked("/v1/rerank", BODY | given)
    assert [one["index"] for one in found["results"]] == [1, 0, 2][:count_]


async def test_objects_keep_their_other_fields() -> None:
    documents = [{"text": "a"}, {"text": "bbb", "title": "B"}, "cc"]
    found, [event] = await asked("/v2/rerank", BODY | {"documents": documents, "return_documents": True})
    assert event.inputs.texts == ["a", "bbb", "cc"]
    assert [one["document"] for one in found["results"]] == [documents[1], {"text": "cc"}, {"text": "a"}]


async def test_parameters_reach_the_event_and_the_model_may_be_left_out() -> None:
    body = {"query": "q", "documents": ["a"], "max_tokens_per_doc": 9, "truncate_prompt_tokens": 30}
    _, [event] = await asked("/v2/rerank", body)
    assert event.model == "demo"
    assert (event.params.max_tokens_per_doc, event.params.truncate_prompt_tokens) == (9, 30)


async def test_images_are_ranked_among_texts() -> None:
    served = replace(RERANKER, modalities=("text", "image"))
    documents = [{"image": data_url(png())}, "ab"]
    found, [event] = await asked("/v1/rerank", BODY | {"documents": documents}, served=served)
    assert (event.inputs.texts, len(event.inputs.files)) == (["ab"], 1)
    assert [one["index"] for one in found["results"]] == [0, 1]


async def test_many_large_documents_are_several_requests_with_one_answer() -> None:
    documents = ["a" * 200_000, "b" * 200_002, "c" * 200_001]
    found, events = await asked("/v2/rerank", BODY | {"documents": documents})
    assert [event.inputs.queries for event in events] == [["cats"]] * 3
    assert [one["index"] for one in found["results"]] == [1, 2, 0]
    assert found["usage"]["prompt_tokens"] == 21


async def test_one_text_is_scored_against_all_or_each_against_its_own() -> None:
    found, [event] = await asked("/v1/score", {"model": "demo", "text_1": "q", "text_2": ["a", "bb"]})
    assert (event.inputs.queries, event.inputs.texts) == (["q"], ["a", "bb"])
    assert [one["score"] for one in found["data"]] == pytest.approx([1.001, 2.001])
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert (found["object"], found["data"][0]["object"]) == ("list", "score")
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}

    found, _ = await asked("/score", {"text_1": ["q", "qq"], "text_2": ["a", "bb"]})
    assert [one["score"] for one in found["data"]] == pytest.approx([1.001, 2.002])
    found, _ = await asked("/v1/score", {"queries": "q", "documents": "a"})
    assert [one["score"] for one in found["data"]] == pytest.approx([1.001])


async def test_an_encoder_scores_by_the_cosine_of_embeddings() -> None:
    body = {"text_1": "aaa", "text_2": ["bbb", "c"]}
    found, [event] = await asked("/v1/score", body, served=ENCODER, script=point)
    assert (event.inputs.texts, event.inputs.queries) == (["aaa", "bbb", "c"], [])
    cosine = (1 + 3 * 1) / (10**0.5 * 2**0.5)
    assert [one["score"] for one in found["data"]] == pytest.approx([1.0, cosine])

    found, _ = await asked("/v1/rerank", BODY, served=ENCODER, script=point)
    assert [one["index"] for one in found["results"]] == [0, 2, 1]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"])
async def test_a_model_that_scores_nothing_says_so(path: str) -> None:
    body = {"text_1": "a", "text_2": "b"} if "score" in path else BODY
    found, events = await asked(path, body, served=SERVED)
    assert (found["error"]["code"], found["error"]["param"]) == ("unsupported_modality", "model")
    assert "scores no texts" in found["error"]["message"]
    assert events == []


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"query": ""}, "query", "invalid_value"),
    ({"query": ["a"]}, "query", "invalid_value"),
    ({"query": {"image": "x"}}, "query.image", "unsupported_modality"),
    ({"documents": []}, "documents", "invalid_value"),
    ({"documents": ["a", ""]}, "documents", "invalid_value"),
    ({"documents": [["a"]]}, "documents", "invalid_value"),
    ({"documents": [{"title": "a"}]}, "documents", "invalid_value"),
    ({"documents": ["a"] * 4}, "documents", "invalid_value"),
    ({"documents": [1, 2]}, "documents", "invalid_value"),
    ({"top_n": -1}, "top_n", "invalid_value"),
    ({"top_n": 1, "top_k": 2}, "top_k", "invalid_value"),
    ({"return_documents": "no"}, "return_documents", "invalid_value"),
    ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", "invalid_value"),
    ({"rank_fields": ["title"]}, "rank_fields", "not_supported"),
    ({"max_chunks_per_doc": 10}, "max_chunks_per_doc", "not_supported"),
    ({"top_m": 1}, "top_m", "unknown_parameter"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"query": None}, "query", "invalid_value"),
    ({"documents": None}, "documents", "invalid_value"),
]


async def test_what_cannot_be_ranked_is_refused_by_name() -> None:
    async with deployment(count, served=RERANKER, settings=GatewaySettings(max_documents=3)) as world:
        for changed, param, code in REFUSED:
            error = (await world.client.post("/v1/rerank", json=BODY | changed)).json()["error"]
            assert (error["param"], error["code"]) == (param, code), error
        assert world.events("request") == []


@pytest.mark.parametrize(("first", "second"), [("top_n", "top_k"), ("top_k", "top_n")])
async def test_a_value_under_two_names_is_refused_by_both(first: str, second: str) -> None:
    found, _ = await asked("/v1/rerank", BODY | {first: 1, second: 2})
    assert found["error"]["message"] == f"{second}: expected it once, found it also as {first}"


@pytest.mark.parametrize("missing", ["query", "documents"])
async def test_a_missing_field_is_named(missing: str) -> None:
    body = {name: value for name, value in BODY.items() if name != missing}
    found, _ = await asked("/v1/rerank", body)
    assert (found["error"]["param"], found["error"]["code"]) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "body", [{"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, {"text_1": ["a", "b"], "text_2": "c"}]
)
async def test_pairs_that_do_not_match_are_refused(body: dict[str, Any]) -> None:
    found, _ = await asked("/v1/score", body)
    assert found["error"]["param"] == "text_1"
    assert "one for each" in found["error"]["message"]


async def test_an_error_names_the_document_in_the_body() -> None:
    async def refused(performance: Performance) -> None:
        message = "texts[2]: expected at most 8 tokens, found 9"
        performance.fail(Failure(code="context_length_exceeded", message=message, status=400))

    found, _ = await asked("/v1/rerank", BODY, script=refused)
    assert found["error"]["param"] == "documents[2]"
