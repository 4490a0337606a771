"""The family: its claims, its node's batches, and what a request must be."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import to_builtins

from configs.checks import resolve
from models import registry
from models.text_encoder.graph import GRAPH
from models.text_encoder.requests import TextsRequest
from shared.errors import ClientError
from shared.events import Inputs, Media, Params
from tests.models.text_encoder.harness import TEXTS, Encoder, some_texts
from tests.tiny import tiny_checkpoint
from tests.tiny.encoders import copy_of, sentence_folder, tiny_encoder


@pytest.mark.parametrize(
    "name", ["bert", "bert-mlm", "xlm-roberta", "modernbert", "mpnet", "embedding-gemma"]
)
def test_encoders_are_claimed(name: str) -> None:
    assert registry.family_of(tiny_encoder(name)) == "text_encoder"


def test_causal_models_are_left_to_the_kv_engine_unless_it_cannot_pool_them(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense  # noqa: PLC0415 - seconds

    last, dense = (
        copy_of(sentence_folder("qwen3-lm", pooling="lasttoken", further=further), tmp_path / name)
        for name, further in (("last", lambda _: []), ("dense", lambda size: [Dense(size, 8)]))
    )
    for folder in (last, dense):  # sentence-transformers saves the part without head
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))

    assert registry.family_of(tiny_checkpoint("qwen3")) == "decoder_lm"
    assert registry.family_of(last) == "decoder_lm"
    assert registry.family_of(dense) == "text_encoder"


def test_a_folder_without_pooling_is_not_claimed(tmp_path: Path) -> None:
    folder = copy_of(sentence_folder("bert"), tmp_path / "colbert")
    [model, *_] = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([model]))

    with pytest.raises(registry.UnknownFamilyError):
        registry.family_of(folder)


def test_a_folder_is_served_without_a_file() -> None:
    assert resolve(str(tiny_encoder("bert"))).model == "text_encoder"
    assert GRAPH.outputs == ("embedding",)


def test_requests_of_one_batch_get_what_they_would_get_alone() -> None:
    encoder = Encoder(sentence_folder("bert"))
    items = [
        encoder.item(TEXTS),
        encoder.item(TEXTS[1]),
        encoder.item(some_texts(4, 30, seed=7), Params(dimensions=5)),
        encoder.item([[5, 6, 7]]),
    ]

    together = encoder.run(*items)

    assert [found.shape for found in together] == [(8, 32), (32,), (2, 5), (1, 32)]
    for found, item in zip(together, items, strict=True):
        assert found == pytest.approx(encoder.run(item)[0], abs=1e-6)
    assert (
        encoder.node.cost(items[0])
        == len(items[0].inputs["tokens"])
        == items[0].inputs["lengths"][:, 0].sum()
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (Inputs(messages=[{"role": "user", "content": "hi"}]), "found a chat"),
        (Inputs(texts=["a"], files=[Media(modality="image", digest="0" * 64)]), "reads text only"),
        (Inputs(texts=["a"], queries=["b"]), "expected no queries"),
        (Inputs(texts=["a"], output_modalities=["audio"]), "makes embeddings"),
        (Inputs(texts=["a", "\ud800"]), "lone surrogate"),
        (Inputs(texts=["a", [4, 999]]), r"texts\[1\]: token id 999"),
    ],
)
def test_what_is_no_text_to_embed_is_refused(inputs: Inputs, message: str) -> None:
    args = {
        "inputs": to_builtins(inputs),
        "params": to_builtins(TextsRequest(inputs=inputs, params=Params()).params),
    }

    with pytest.raises(ClientError, match=message):
        Encoder(tiny_encoder("bert")).processing.run("prepare", "key", {}, args)


def test_token_ids_are_embedded_as_they_are() -> None:
    encoder = Encoder(sentence_folder("bert", prompts={"query": "a "}, default_prompt="query"))

    assert np.array_equal(encoder.embed([[2, 5, 3]]), encoder.embed([[2, 5, 3]], prompt="the"))
    assert encoder.embed([[2, 4, 5, 3]]) == pytest.approx(encoder.embed(["red"]), abs=1e-6)
