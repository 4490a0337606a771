"""An encoder behind `/v1/embeddings`, `/v1/rerank` and `/v1/score`, and the client over HTTP and NATS."""

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from dalsegno import Client, Credentials
from tests.e2e.deploy import Running, serve
from tests.tiny.encoders import tiny_encoder

pytestmark = pytest.mark.processes
TEXTS = ["a red cat", "the dog on the mat", "mat"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(tmp_path_factory.mktemp("encoder"), model=str(tiny_encoder("bert"))) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> Any:
    return httpx.post(f"{running.url}{path}", json=body, timeout=60).json()


def embed(running: Running, **body: Any) -> list[Any]:
    found = post(running, "/v1/embeddings", **{"model": "bert", "input": TEXTS, **body})
    return [one["embedding"] for one in found["data"]]


def unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    scaled: npt.NDArray[np.float32] = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled


def test_all_encodings_are_of_the_same_vectors(encoder: Running) -> None:
    vectors = np.array(embed(encoder), np.float32)
    assert vectors.shape == (3, 32)
    decoded = [np.frombuffer(b64decode(one), "<f4") for one in embed(encoder, encoding_format="base64")]
    assert np.array_equal(np.stack(decoded), vectors)
    assert np.array_equal(embed(encoder, encoding_format="ubinary"), np.packbits(vectors > 0, axis=1))
    quantized = np.array(embed(encoder, embedding_type="int8"), np.float32)
    assert (unit(quantized) * unit(vectors)).sum(axis=1).min() > 0.999


def test_an_encoder_ranks_by_the_cosine_of_its_vectors(encoder: Running) -> None:
    query, *documents = unit(np.array(embed(encoder, input=["red", *TEXTS]), np.float32))
    scores = np.array(documents) @ query
    found = post(encoder, "/v1/score", text_1="red", text_2=TEXTS)
    assert [one["score"] for one in found["data"]] == pytest.approx(scores.tolist(), abs=1e-5)
    best = post(encoder, "/v1/rerank", query="red", documents=TEXTS)["results"]
    assert [one["index"] for one in best] == np.argsort(-scores).tolist()


def test_a_long_text_is_named_or_cut(encoder: Running) -> None:
    long = "cat " * 500
    error = post(encoder, "/v1/embeddings", model="bert", input=["a", long])["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    cut, same = embed(encoder, input=[long, "cat cat cat"], truncate_prompt_tokens=5)
    assert cut == pytest.approx(same, abs=1e-5)


def test_the_client_gets_the_same_over_http_and_nats(encoder: Running) -> None:
    ready = json.loads(encoder.ready_file.read_text())
    shown = Credentials(**ready["nats_client"])
    with (
        Client(encoder.url) as http,
        Client(ready["nats_url"], credentials=shown, prefix=ready["prefix"]) as nats,
    ):
        vectors = http.embed_all(TEXTS)
        assert nats.embed_all(TEXTS) == vectors
        assert http.embed(TEXTS[0]) == pytest.approx(vectors[0], abs=1e-5)
