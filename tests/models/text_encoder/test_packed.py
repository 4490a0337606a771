"""The packed states of texts against stock forwards of transformers, one text at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.text_encoder import attention
from models.text_encoder.packed import PackedEncoder
from tests.tiny.encoders import ARCHITECTURES, PACKED, copy_of, tiny_encoder

LENGTHS = (5, 9, 1, 40, 9, 23, 2)
TEXTS = [[(7 * n + 3 * place) % 200 + 4 for place in range(length)] for n, length in enumerate(LENGTHS)]


def stock(name: str, texts: list[list[int]]) -> list[torch.Tensor]:
    model: Any = AutoModel.from_pretrained(tiny_encoder(name)).eval()
    with torch.inference_mode():
        found = [model(torch.tensor([ids]), torch.ones(1, len(ids)).long()) for ids in texts]
    return [output.last_hidden_state[0] for output in found]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_states_are_those_of_each_text_alone(name: str) -> None:
    encoder, expected = PackedEncoder.load(tiny_encoder(name)), stock(name, TEXTS)

    together = encoder.states(TEXTS)
    encoder.max_tokens = 24
    divided = encoder.states(TEXTS)

    for found, again, wanted in zip(together, divided, expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
        assert torch.allclose(again, wanted, atol=1e-5)
    assert (type(encoder._forward).__name__ != "EqualLengths") == (name in PACKED)


def test_a_padding_token_within_a_text_has_the_position_that_the_model_gives_it() -> None:
    texts = [[5, 1, 9, 1, 30], [8, 9]]

    found = PackedEncoder.load(tiny_encoder("xlm-roberta")).states(texts)

    for one, wanted in zip(found, stock("xlm-roberta", texts), strict=True):
        assert torch.allclose(one, wanted, atol=1e-5)


def test_token_types_reach_the_model() -> None:
    encoder = PackedEncoder.load(tiny_encoder("bert"))
    model: Any = AutoModel.from_pretrained(tiny_encoder("bert")).eval()
    types = [[place % 2 for place in range(len(ids))] for ids in TEXTS]

    found = encoder.states(TEXTS, types)

    for one, ids, kinds in zip(found, TEXTS, types, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).last_hidden_state[0]
        assert torch.allclose(one, wanted, atol=1e-5)
        assert len(ids) < 2 or not torch.allclose(one, encoder.states([ids])[0], atol=1e-2)


@pytest.mark.parametrize("name", ["modernbert", "mistral", "embedding-gemma"])
def test_a_window_is_the_same_in_blocks_of_queries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WINDOW_BLOCK", 7)

    [found] = PackedEncoder.load(tiny_encoder(name)).states([TEXTS[3]])

    assert torch.allclose(found, stock(name, [TEXTS[3]])[0], atol=1e-5)


def test_without_runs_of_their_own_texts_would_see_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PackedEncoder.load(tiny_encoder("bert"))
    alone = encoder.states(TEXTS)

    monkeypatch.setattr(
        "models.text_encoder.packed.runs_of", lambda lengths: [attention.Run(0, 1, sum(lengths))]
    )
    mixed = encoder.states(TEXTS)

    assert max(float((a - b).abs().max()) for a, b in zip(alone, mixed, strict=True)) > 0.1


def test_padding_without_a_mask_would_change_the_states() -> None:
    model: Any = AutoModel.from_pretrained(tiny_encoder("bert")).eval()
    with torch.inference_mode():
        padded = model(torch.tensor([TEXTS[0] + [0] * 9])).last_hidden_state[0, :5]

    assert float((padded - stock("bert", TEXTS[:1])[0]).abs().max()) > 0.1


def test_matrices_are_packed_on_a_cpu_in_float32_only() -> None:
    kinds = [
        {
            type(module).__name__
            for module in PackedEncoder.load(tiny_encoder("bert"), dtype=dtype).model.modules()
        }
        for dtype in ("float32", "bfloat16")
    ]

    assert ["PrepackedLinear" in kind for kind in kinds] == [True, False]


def test_half_precision_weights_are_read(tmp_path: Path) -> None:
    folder = copy_of(tiny_encoder("bert"), tmp_path / "half")
    weights = load_file(folder / "model.safetensors")
    save_file({name: one.half() for name, one in weights.items()}, folder / "model.safetensors")

    encoder = PackedEncoder.load(folder)

    assert encoder.dtype == torch.float32
    for found, wanted in zip(encoder.states(TEXTS), stock("bert", TEXTS), strict=True):
        assert torch.allclose(found, wanted, atol=0.05)


def test_a_missing_tensor_and_an_unknown_class_are_named(tmp_path: Path) -> None:
    lacking, unknown = (
        copy_of(tiny_encoder("bert"), tmp_path / "a"),
        copy_of(tiny_encoder("bert"), tmp_path / "b"),
    )
    weights = load_file(lacking / "model.safetensors")
    del weights["encoder.layer.1.output.dense.bias"]
    save_file(weights, lacking / "model.safetensors")
    config = json.loads((unknown / "config.json").read_text()) | {"architectures": ["NewModel"]}
    (unknown / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=r"encoder\.layer\.1\.output\.dense\.bias"):
        PackedEncoder.load(lacking)
    with pytest.raises(UnsupportedArchitectureError, match=r"NewModel .*expected a text encoder"):
        PackedEncoder.load(unknown)
