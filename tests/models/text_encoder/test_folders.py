"""sentence-transformers folders: every module and setting against its `encode`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checkpoints.files import CheckpointError
from models.text_encoder import folder as folders
from models.text_encoder.head import pooled
from models.text_encoder.weight_files import weight_files
from shared.errors import ClientError
from shared.events import Params
from tests.models.text_encoder.harness import TEXTS, Encoder, encoded, some_texts
from tests.tiny.encoders import copy_of, sentence_folder, tiny_encoder

PROMPTS = {"query": "the query : ", "document": "a mat : "}
MODES = (*folders.POOLING_MODES, ("cls", "max", "mean"), ("lasttoken", "weightedmean"))


def modules(size: int) -> list[Any]:
    from sentence_transformers.sentence_transformer import modules as of  # noqa: PLC0415 - seconds

    torch.manual_seed(1)
    wide = of.Dense(size, 48, activation_function=torch.nn.Identity(), bias=False)
    return [wide, of.Dense(48, 24), of.LayerNorm(24), of.Dropout(0.5), of.Normalize()]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_pooling_mode_with_prompts(mode: Any, *, include_prompt: bool) -> None:
    folder = sentence_folder(
        "bert", pooling=mode, include_prompt=include_prompt, prompts=PROMPTS, default_prompt="document"
    )
    encoder = Encoder(folder)

    by_default, chosen = encoder.embed(TEXTS), encoder.embed(TEXTS, prompt_name="query")

    assert by_default == pytest.approx(encoded(folder, TEXTS), abs=1e-5)
    assert chosen == pytest.approx(encoded(folder, TEXTS, prompt_name="query"), abs=1e-5)
    assert np.abs(by_default - chosen).max() > 0.01
    assert np.abs(by_default - encoder.embed(TEXTS, prompt="")).max() > 0.01


def test_all_modules_behind_the_pooling() -> None:
    folder = sentence_folder("bert", further=modules)
    found = Encoder(folder)

    expected = encoded(folder, TEXTS)

    assert found.embed(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert np.linalg.norm(expected, axis=1) == pytest.approx(1)
    cut = found.embed(TEXTS, Params(dimensions=8))
    assert cut == pytest.approx(encoded(folder, TEXTS, truncate_dim=8, normalize_embeddings=True), abs=1e-5)
    assert {"2_Dense/model.safetensors", "3_Dense/model.safetensors", "model.safetensors"} <= set(
        weight_files(folder, "encoder", {})
    )


def test_a_layer_behind_the_scaling_ends_it() -> None:
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize  # noqa: PLC0415 - seconds

    folder = sentence_folder("bert", further=lambda size: [Normalize(), Dense(size, 16)])

    cut = Encoder(folder).embed(TEXTS, Params(dimensions=4))

    assert cut == pytest.approx(encoded(folder, TEXTS, truncate_dim=4), abs=1e-5)
    assert np.abs(np.linalg.norm(cut, axis=1) - 1).min() > 0.01, "the control: they have other lengths"


def test_the_folder_says_the_dimensions_without_a_choice(tmp_path: Path) -> None:
    folder = copy_of(sentence_folder("bert", further=modules), tmp_path / "short")
    path = folder / folders.SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncate_dim": 8}))
    encoder = Encoder(folder)

    found = encoder.embed(TEXTS)

    assert found.shape == (len(TEXTS), 8)
    assert found == pytest.approx(encoded(folder, TEXTS), abs=1e-5)
    chosen = encoder.embed(TEXTS, Params(dimensions=12))
    assert chosen == pytest.approx(
        encoded(folder, TEXTS, truncate_dim=12, normalize_embeddings=True), abs=1e-5
    )
    path.write_text(json.dumps({"truncate_dim": 0}))
    with pytest.raises(CheckpointError, match="expected a positive integer in truncate_dim, found 0"):
        folders.read(folder)


def test_dimensions_are_those_that_the_checkpoint_names(tmp_path: Path) -> None:
    folder = copy_of(sentence_folder("bert"), tmp_path / "matryoshka")
    config = json.loads((folder / "config.json").read_text()) | {"matryoshka_dimensions": [8, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    encoder = Encoder(folder)

    assert encoder.embed(TEXTS, Params(dimensions=16)).shape == (len(TEXTS), 16)
    with pytest.raises(ClientError, match=r"dimensions: expected one of \[8, 16, 32\]"):
        encoder.embed(TEXTS, Params(dimensions=9))


def test_texts_are_cut_as_the_folder_says_and_as_the_request_says() -> None:
    folder = sentence_folder("xlm-roberta", max_seq_length=12, do_lower_case=True)
    encoder, long = Encoder(folder), [text.upper() for text in some_texts(30, 10, 11)]

    assert encoder.embed(long) == pytest.approx(encoded(folder, long), abs=1e-5)
    for tokens in (5, 40):
        told = {"text": {"max_length": tokens}}
        assert encoder.embed(long, Params(truncate_prompt_tokens=tokens)) == pytest.approx(
            encoded(folder, long, processing_kwargs=told), abs=1e-5
        )
    last = encoder.embed(long[:1], Params(truncation_side="left"))
    assert last == pytest.approx(encoded(folder, [" ".join(long[0].split()[-10:])]), abs=1e-5)
    assert encoder.embed([[5] * 30]) == pytest.approx(encoder.embed([[5] * 12]), abs=1e-5)


def test_a_plain_model_is_pooled_by_the_mean_and_refuses_long_texts() -> None:
    folder = tiny_encoder("roberta")
    encoder, texts = Encoder(folder), some_texts(3, 20)

    assert encoder.embed(texts) == pytest.approx(encoded(folder, texts), abs=1e-5)
    with pytest.raises(ClientError, match=r"takes texts of 126 tokens, but texts\[1\] has 302") as refused:
        encoder.embed(["a", *some_texts(300)])
    assert refused.value.code == "context_length_exceeded"
    assert encoder.embed(some_texts(300), Params(truncate_prompt_tokens=-1)).shape == (1, 32)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (Params(truncate_prompt_tokens=2), {}, "more than the 2 special tokens"),
        (Params(truncate_prompt_tokens=1000), {}, "at most the model's 126 tokens"),
        (Params(dimensions=33), {}, "dimensions: expected at most 32"),
        (Params(echo=True), {}, "expected no echo"),
        (None, {"prompt_name": "query"}, "prompt_name: .* has none; found 'query'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    params: Params | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        Encoder(tiny_encoder("roberta")).item(["a red cat on the mat"], params, **options)


def test_a_prompt_longer_than_a_cut_text_leaves_nothing_but_no_error() -> None:
    states = torch.randn(4, 6)

    assert torch.equal(pooled(states, ["mean"], 9), torch.zeros(6))
    assert torch.equal(pooled(states, ["cls"], 9), states[0])
    assert torch.equal(pooled(states, ["lasttoken"], 9), states[3])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "modules.json",
            lambda found: [*found[:2], found[1] | {"type": "sentence_transformers.models.CNN"}],
            "'CNN'",
        ),
        (
            "modules.json",
            lambda found: [found[0] | {"type": "custom_st.Transformer"}],
            "custom_st.Transformer",
        ),
        ("1_Pooling/config.json", lambda found: found | {"pooling_mode": "median"}, "found median"),
        ("2_Dense/config.json", lambda found: found | {"activation_function": "os.system"}, "os.system"),
        ("2_Dense/config.json", lambda found: found | {"out_features": 47}, "does not fit"),
        (
            "config_sentence_transformers.json",
            lambda found: found | {"default_prompt_name": "x"},
            "default_prompt_name",
        ),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(
    tmp_path: Path, name: str, change: Any, message: str
) -> None:
    folder = copy_of(sentence_folder("bert", further=modules), tmp_path / "damaged")
    (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))

    with pytest.raises(CheckpointError, match=message):
        Encoder(folder)
