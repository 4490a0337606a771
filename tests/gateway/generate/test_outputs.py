"""Outputs of `/generate` of any size: pieces, files of tensors, advisory chunks."""

import json
from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from dalsegno.client.answer import Answer, Chunk
from dalsegno.client.http_transport import item_of
from gateway.generate import spool
from gateway.generate.spool import Spool
from gateway.generate.tensor_files import TensorFormat, TensorHead, base64_of, file_of
from shared.output_pieces import piece_spans
from tests.gateway.world import SERVED, Performance, deployment

PAINTER: Final = replace(SERVED, outputs=("text", "features"))
FEATURES: Final = np.linspace(-1, 1, 3000, dtype=np.float32).reshape(3, 1000)
OTHERS: Final = FEATURES + np.float32(1)
PIECES: Final = 3
PROGRESS: Final = {"node": "denoiser", "progress": {"step": 1, "steps": 2, "status": "begun", "index": 7}}


def put(performance: Performance, array: npt.NDArray[Any], pieces: int = PIECES) -> None:
    """Put an array's first pieces of 5000 bytes into the log."""
    data = array.tobytes()
    for piece, start, stop in piece_spans("tower.features", len(data), 5000)[:pieces]:
        metadata = {"dtype": str(array.dtype), "shape": list(array.shape), **piece.metadata}
        performance.value("features", data[start:stop], metadata)


async def paint(performance: Performance) -> None:
    """Two tensors; the first was begun by an attempt that died, with other numbers."""
    performance.say("two:")
    put(performance, OTHERS, pieces=2)
    put(performance, FEATURES)
    put(performance, OTHERS)
    performance.finish()


def opened(form: str, data: bytes) -> npt.NDArray[Any]:
    """The tensor in the bytes of an entry."""
    match form:
        case "npz":
            found: npt.NDArray[Any] = np.load(BytesIO(data))["features"]
        case "safetensors":
            found = safetensors.numpy.load(data)["features"]
        case _:
            found = np.frombuffer(data, np.float32).reshape(3, 1000)
    return found


@pytest.mark.parametrize("form", ["raw", "npz", "safetensors"])
async def test_a_document_has_whole_tensors_in_the_format_that_was_asked_for(form: str) -> None:
    async with deployment(paint, served=PAINTER) as world:
        body = {"text": "Hi", "streaming": False, "tensor_format": form}
        response = await world.client.post("/generate", json=body)

    outputs = response.json()["outputs"]
    found = [opened(form, b64decode(entry["data"])) for entry in outputs["features"]]
    assert np.array_equal(found, [FEATURES, OTHERS])
    about = {"dtype": "float32", "shape": [3, 1000]} | ({} if form == "raw" else {"format": form})
    assert [entry["metadata"] for entry in outputs["features"]] == [about, about]
    assert b64decode(outputs["text"][0]["data"]) == b"two:"


@pytest.mark.parametrize("form", ["npz", "safetensors"])
async def test_a_stream_has_a_line_for_each_whole_tensor_with_the_index_of_its_last_piece(form: str) -> None:
    async with deployment(paint, served=PAINTER) as world:
        response = await world.client.post("/generate", json={"text": "Hi", "tensor_format": form})

    text, first, second, _ = map(json.loads, response.text.splitlines())
    assert (text["modality"], first["metadata"]["index"], second["metadata"]["index"]) == ("text", 5, 8)
    assert np.array_equal(opened(form, b64decode(first["data"])), FEATURES)
    assert np.array_equal(opened(form, b64decode(second["data"])), OTHERS)


async def test_a_stream_that_is_resumed_has_the_tensors_that_its_client_lacks() -> None:
    async with deployment(paint, served=PAINTER) as world:
        body = {"text": "Hi", "tensor_format": "npz", "request_id": "mine"}
        whole = await world.client.post("/generate", json=body)
        rest = await world.client.post("/generate", json=body, headers={"last-event-id": "5"})
    assert rest.text.splitlines() == whole.text.splitlines()[2:]


async def test_raw_pieces_are_streamed_as_they_are_and_the_client_makes_whole_tensors_of_them() -> None:
    async with deployment(paint, served=PAINTER) as world:
        response = await world.client.post("/generate", json={"text": "Hi"})

    answer = Answer("r")
    chunks = [
        item for line in response.text.splitlines() if isinstance(item := item_of(line.encode()), Chunk)
    ]
    for chunk in chunks:
        answer.take(chunk)
    assert [chunk.index for chunk in chunks] == list(range(9))
    assert np.array_equal(answer.tensors("features"), [FEATURES, OTHERS])
    assert max(len(chunk.data) for chunk in chunks) == 5000


async def test_an_unknown_format_of_tensors_is_refused_by_name() -> None:
    async with deployment(served=PAINTER) as world:
        response = await world.client.post("/generate", json={"text": "Hi", "tensor_format": "pickle"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tensor_format")
    assert "raw, npz, safetensors" in error["message"]


# ---- advice -------------------------------------------------------------------------------------------


async def advise(performance: Performance) -> None:
    performance.value("progress", b"", PROGRESS, advisory=True)
    performance.say("Hello")
    performance.value("image", b"preview", {"dtype": "uint8", "shape": [7]}, advisory=True)
    performance.finish()


async def test_advice_is_streamed_and_is_no_part_of_the_answer() -> None:
    async with deployment(advise) as world:
        streamed = await world.client.post("/generate", json={"text": "Hi"})
        document = await world.client.post("/generate", json={"text": "Hi", "streaming": False})

    items = [item_of(line.encode()) for line in streamed.text.splitlines()]
    chunks = [item for item in items if isinstance(item, Chunk)]
    assert [(one.modality, one.index, one.advisory) for one in chunks] == [
        ("progress", -1, True),
        ("text", 0, False),
        ("image", 0, True),
    ]
    assert chunks[0].metadata == PROGRESS
    assert list(document.json()["outputs"]) == ["text"]


async def test_a_resumed_stream_repeats_no_advice_from_before_its_position() -> None:
    async with deployment(advise) as world:
        body = {"text": "Hi", "request_id": "mine"}
        await world.client.post("/generate", json=body)
        rest = await world.client.post("/generate", json=body, headers={"last-event-id": "0"})
    assert [json.loads(line)["modality"] for line in rest.text.splitlines()] == ["image", "text"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_leaves_advice_out(stream: bool) -> None:
    async with deployment(advise) as world:
        body = {"model": SERVED.name, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        response = await world.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert "Hello" in response.text
    assert "denoiser" not in response.text


# ---- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["npz", "safetensors"])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3)])
def test_a_file_has_the_tensor(form: TensorFormat, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    data = array.tobytes()
    head = TensorHead("features", dtype, shape)
    found = opened(form, b"".join(file_of(form, head, [data[:3], data[3:]], len(data))))
    assert (found.dtype, found.shape) == (array.dtype, shape)
    assert np.array_equal(found, array)


def test_bfloat16_is_float32_in_an_npz() -> None:
    exact = np.array([1.5, -2.0, 0.15625], np.float32)
    halves = (exact.view(np.uint32) >> 16).astype("<u2").tobytes()
    head = TensorHead("features", "bfloat16", (3,))
    assert np.array_equal(opened("npz", b"".join(file_of("npz", head, [halves], len(halves)))), exact)


@pytest.mark.parametrize("sizes", [[], [1], [2, 2, 2], [3, 3], [5, 0, 1, 7]])
def test_base64_does_not_depend_on_the_pieces(sizes: list[int]) -> None:
    pieces = [bytes(range(size)) for size in sizes]
    assert b64decode(b"".join(base64_of(pieces))) == b"".join(pieces)


def test_a_spool_keeps_little_in_memory_and_gives_its_bytes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MEMORY_BYTES", 4)
    waiting = Spool()
    spans = [waiting.append(data) for data in (b"abc", b"", b"defgh")]
    assert b"".join(waiting.blocks([spans[2], spans[0]])) == b"defghabc"
    assert waiting.is_on_disk
    waiting.clear()
    assert b"".join(waiting.blocks([waiting.append(b"x")])) == b"x"
    waiting.clear()
