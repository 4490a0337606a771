"""Text encoders compared with sentence-transformers on the same CPU: texts per second, and equal vectors.

The models are a BERT of MiniLM's size and one of BERT-base's size, with random weights. The texts have 4 to
200 words. Measured in turns, for each model:

- 32 clients, each with one text per request, over HTTP;
- the same clients with 8 texts per request;
- sentence-transformers' `encode` of one text per call, as a server without batching calls it: by 32
  threads, and one call after another; the better of both is the peer;
- its `encode` of all texts at once, sorted and padded by itself.

The peer is called in the process of the benchmark: HTTP costs it nothing.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.client import Connection
from benchmarks.machine import new_loop
from benchmarks.report import RATIO, Figure, spread
from tests.e2e.deploy import Running, serve

ROUNDS: Final = 3
CLIENTS: Final = 32
AT_ONCE: Final = 8
"""Texts of a request with several."""
SIZES: Final = {"MiniLM": (384, 6, 256), "BERT-base": (768, 12, 64)}
"""The width and the number of layers of each model, and the number of texts of a round."""
Vectors = npt.NDArray[np.float32]


def make_checkpoint(folder: Path, width: int, layers: int) -> None:
    """Write a sentence-transformers folder around a BERT of random weights: mean, length 1."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=4 * width,
    )
    raw = folder.with_name(f"{folder.name}-model")
    BertModel(config).save_pretrained(raw)
    _tokenizer().save_pretrained(raw)
    SentenceTransformer(modules=[Transformer(str(raw)), Pooling(width), Normalize()]).save(str(folder))


def _tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer in BERT's way, of the words of this project's pages."""
    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    found.train_from_iterator(_pages(), trainers.WordPieceTrainer(vocab_size=30_000, special_tokens=special))
    found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=found,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=512,
    )


def _pages() -> list[str]:
    return [page.read_text() for page in sorted(Path("docs").glob("*.md"))]


def texts(number: int) -> list[str]:
    """Texts of 4 to 200 words, half of them below 30."""
    draws = Random(0)
    words = " ".join(_pages()).split()
    found = []
    for _ in range(number):
        count = min(200, max(4, int(draws.lognormvariate(3.4, 0.8))))
        begin = draws.randrange(len(words) - count)
        found.append(" ".join(words[begin : begin + count]))
    return found


def measure() -> list[Figure]:
    figures: list[Figure] = []
    for name, (width, layers, number) in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as place:
            checkpoint = Path(place) / "encoder"
            make_checkpoint(checkpoint, width, layers)
            with serve(Path(place), model=str(checkpoint)) as running, new_loop() as loop:
                figures += _compared(name, texts(number), _Ours(running, loop), _Peer(checkpoint))
    return figures


def _compared(name: str, given: list[str], ours: "_Ours", peer: "_Peer") -> list[Figure]:
    ways: dict[str, Callable[[Sequence[str]], Vectors]] = {
        "one": lambda these: ours.embed(these, 1),
        "several": lambda these: ours.embed(these, AT_ONCE),
        "threads": peer.by_threads,
        "in turn": peer.in_turn,
        "batch": peer.at_once,
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    vectors: dict[str, Vectors] = {}
    for number in range(ROUNDS + 1):
        for way, embed in ways.items():
            begun_s = time.perf_counter()
            vectors[way] = embed(given)
            if number:  # the first round is the warm-up
                rates[way].append(len(given) / (time.perf_counter() - begun_s))
    single = [max(pair) for pair in zip(rates["threads"], rates["in turn"], strict=True)]
    apart = max(float(np.abs(vectors[way] - vectors["batch"]).max()) for way in ("one", "several"))
    words = f"threads {median(rates['threads']):.0f}, in turn {median(rates['in turn']):.0f}"
    return [
        _ratio(f"{name}: 32 clients, a text each / encode per text", rates["one"], single),
        _ratio(f"{name}: {AT_ONCE} texts per request / encode per text", rates["several"], single),
        _ratio(f"{name}: {AT_ONCE} texts per request / best encode of all", rates["several"], rates["batch"]),
        _ratio(f"{name}: 32 clients, a text each / best encode of all", rates["one"], rates["batch"]),
        spread(f"{name}: 32 clients, a text each", rates["one"], "/s"),
        spread(f"{name}: {AT_ONCE} texts per request", rates["several"], "/s"),
        spread(f"{name}: encode of one text per call", single, "/s", words),
        spread(f"{name}: encode of all texts", rates["batch"], "/s"),
        Figure(f"{name}: largest difference of a vector's numbers", apart, ""),
    ]


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    return spread(name, [mine / other for mine, other in zip(ours, theirs, strict=True)], RATIO)


@dataclass(frozen=True, slots=True)
class _Ours:
    """The server, asked over HTTP by 32 clients."""

    running: Running
    loop: asyncio.Runner

    def embed(self, given: Sequence[str], at_once: int) -> Vectors:
        return self.loop.run(self._embed([given[at : at + at_once] for at in range(0, len(given), at_once)]))

    async def _embed(self, requests: Sequence[Sequence[str]]) -> Vectors:
        found: dict[int, Any] = {}
        left = iter(enumerate(requests))

        async def client() -> None:
            async with Connection(self.running.url) as connection:
                for index, of_request in left:
                    body = {"model": "encoder", "input": [*of_request], "encoding_format": "base64"}
                    reply = await connection.post("/v1/embeddings", body)
                    found[index] = msgspec.json.decode(reply.body)["data"]

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(client())
        rows = [row["embedding"] for index in range(len(requests)) for row in found[index]]
        return np.stack([np.frombuffer(_bytes(row), "<f4") for row in rows])


def _bytes(row: str) -> bytes:
    return msgspec.json.decode(f'"{row}"'.encode(), type=bytes)


class _Peer:
    """sentence-transformers, in this process."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = SentenceTransformer(str(checkpoint), device="cpu")
        self._threads = ThreadPoolExecutor(CLIENTS)

    def by_threads(self, given: Sequence[str]) -> Vectors:
        return np.stack([*self._threads.map(self._one, given)])

    def in_turn(self, given: Sequence[str]) -> Vectors:
        return np.stack([self._one(text) for text in given])

    def at_once(self, given: Sequence[str]) -> Vectors:
        return np.asarray(self._model.encode([*given], batch_size=32))

    def _one(self, text: str) -> Vectors:
        return np.asarray(self._model.encode([text])[0])
