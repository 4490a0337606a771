"""Embeddings of real deployments: equal to transformers', on every route; and what is kept of them."""

import asyncio
import os
import signal
from base64 import b64decode
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import dalsegno
from shared.events import NodeReady, OutputFence
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

CHECKPOINT = tiny_checkpoint("qwen3")
MODEL = CHECKPOINT.name
TEXTS = [f"What do {number} wizards eat?" * (1 + number % 5) for number in range(32)]


def expected(texts: list[str]) -> npt.NDArray[np.float32]:
    """The last token's state, by transformers alone, normalised."""
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    found = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids])
            found.append(model.base_model(input_ids=ids).last_hidden_state[0, -1])
    vectors: npt.NDArray[np.float32] = torch.nn.functional.normalize(torch.stack(found)).numpy()
    return vectors


def ask(running: Running, *, is_strict: bool = False) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=clients.PATIENCE_S,
        _strict_response_validation=is_strict,
    )


async def test_openais_client_gets_what_transformers_computes(random_deployment: Running) -> None:
    async with ask(random_deployment, is_strict=True) as strict, ask(random_deployment) as client:
        [model] = [one.id async for one in strict.models.list()]
        numbers = await strict.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        decoded = await client.embeddings.create(model=model, input=TEXTS)
        raw = await client.embeddings.create(model=model, input=TEXTS[3], encoding_format="base64")
        alone = [await client.embeddings.create(model=model, input=text) for text in TEXTS[:4]]

    wanted = pytest.approx(expected(TEXTS), abs=1e-5)
    assert np.array([one.embedding for one in numbers.data]) == wanted
    assert np.array([one.embedding for one in decoded.data]) == wanted
    assert [one.index for one in numbers.data] == list(range(len(TEXTS)))
    said: Any = raw.data[0].embedding
    assert np.frombuffer(b64decode(said), "<f4") == pytest.approx(expected(TEXTS[3:4])[0], abs=1e-5)
    for place, one in enumerate(alone):
        assert np.array(one.data[0].embedding) == pytest.approx(expected([TEXTS[place]])[0], abs=1e-5)
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens > len(TEXTS)


async def test_what_the_checkpoint_does_not_allow_is_refused(random_deployment: Running) -> None:
    async with ask(random_deployment) as client:
        [model] = [one.id async for one in client.models.list()]
        with pytest.raises(openai.BadRequestError, match="dimensions: expected one of 64") as cut:
            await client.embeddings.create(model=model, input="x", dimensions=8)
        with pytest.raises(openai.BadRequestError, match="context length") as long:
            await client.embeddings.create(model=model, input="long " * 5000)
    assert cut.value.code == "dimensions_not_supported"
    assert long.value.code == "context_length_exceeded"


async def test_the_native_route_and_both_transports_of_our_client(random_deployment: Running) -> None:
    running = random_deployment
    wanted = pytest.approx(expected(TEXTS[:1])[0], abs=1e-5)
    async with clients.http(running) as http:
        body = {"text": TEXTS[0], "output_modalities": "embedding", "streaming": False}
        document = (await http.post("/generate", json=body)).json()
    async with (
        dalsegno.AsyncClient(running.url) as over_http,
        dalsegno.AsyncClient(
            running.nats_url, credentials=running.client, prefix=running.prefix
        ) as over_nats,
    ):
        vectors = [await one.embed(TEXTS[0]) for one in (over_http, over_nats)]
        kept = [await one.warm("A beginning. " * 20, chat=False) for one in (over_http, over_nats)]

    [entry] = document["outputs"]["embedding"]
    assert entry["metadata"]["shape"] == [64]
    assert entry["metadata"]["dtype"] == "float32"
    for found in (np.frombuffer(b64decode(entry["data"]), "<f4"), *map(np.array, vectors)):
        assert found == wanted
    assert kept[0] == kept[1] > 0
    assert kept[0] % 16 == 0


def states_of(text: str) -> npt.NDArray[np.float32]:
    """Transformers' own last hidden states of a text: (tokens, hidden)."""
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    ids = torch.tensor([Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(text).ids])
    with torch.inference_mode():
        found: npt.NDArray[np.float32] = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    return np.asarray(found)


async def test_hidden_states_are_those_of_transformers_token_by_token(random_deployment: Running) -> None:
    running, text = random_deployment, TEXTS[4]
    body = {"text": text, "output_modalities": "hidden_states", "streaming": False}
    async with clients.http(running) as http:
        document = (await http.post("/generate", json=body)).json()
        long = await http.post("/generate", json=body | {"text": "long " * 5000})
        both = await http.post("/generate", json=body | {"output_modalities": "embedding,hidden_states"})
    async with dalsegno.AsyncClient(
        running.nats_url, credentials=running.client, prefix=running.prefix
    ) as over_nats:
        answer = await over_nats.generate(text, chat=False, output_modalities=("hidden_states",))

    expected = states_of(text)
    [entry] = document["outputs"]["hidden_states"]
    assert (
        entry["metadata"] | {"shape": [*expected.shape], "dtype": "float32", "first": 0} == entry["metadata"]
    )
    found = np.frombuffer(b64decode(entry["data"]), "<f4").reshape(expected.shape)
    assert found == pytest.approx(expected, abs=1e-5)
    assert np.array(answer.hidden_states) == pytest.approx(expected, abs=1e-5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected)
    assert (long.status_code, both.json()["error"]["code"]) == (400, "unsupported_modality")


async def test_embeddings_come_though_their_worker_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The worker has the orders and is stopped before it can execute them; then it is killed."""
    with deploy.serve(tmp_path_factory.mktemp("embed"), model=str(CHECKPOINT)) as running:
        pid = running.pids.worker["0"]
        async with clients.http(running) as http, clients.reader(running) as reader:
            os.kill(pid, signal.SIGSTOP)
            body = {"model": MODEL, "input": TEXTS[:4], "request_id": "killed"}
            body["model"] = (await http.get("/v1/models")).json()["data"][0]["id"]
            asking = asyncio.create_task(http.post("/v1/embeddings", json=body))
            await reader.until(reader.subjects.ready(0, "killed-3"), NodeReady)
            os.kill(pid, signal.SIGKILL)
            response = await asking
            fences = [isinstance(event, OutputFence) for event in await reader.events("killed-3")]
    assert response.status_code == 200, response.text
    data = msgspec.json.decode(response.content)["data"]
    found = np.array([one["embedding"] for one in data])
    assert found == pytest.approx(expected(TEXTS[:4]), abs=1e-5)
    assert any(fences)
