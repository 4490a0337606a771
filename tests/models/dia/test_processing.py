"""Texts become the bytes of transformers' tokenizer, and what cannot be spoken is refused before that."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import DiaTokenizer

from models.checkpoints.files import CheckpointError
from models.dia.decoder import DiaDecoder
from models.dia.graph import MAX_POSITIONS
from models.dia.nodes import examine, load
from models.dia.options import DiaOptions
from models.dia.processing import token_ids
from models.dia.settings import DiaSettings
from shared.errors import ClientError
from shared.tensors import read_ids
from tests.models.dia.serving import Asked, walks
from tests.tiny.dia import tiny_dia


@pytest.mark.parametrize(
    "text",
    [
        "[S1] hello",
        "hello[S2]",
        "[S1] ä [S2]  ü\n[s1] [S3] (laughs)",
        "<pad>[S1][S2]",
        "語 🎈",
        "[S",
        " [S1] ",
    ],
)
def test_tokens_are_those_of_transformers(text: str) -> None:
    assert token_ids(text) == DiaTokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("asked", "spoken"),
    [
        (Asked("hello"), "[S1] hello"),
        (Asked("hello", voice="s2"), "[S2] hello"),
        (Asked("[S1] hello [S2] hi", voice="S2"), "[S1] hello [S2] hi"),
    ],
)
def test_a_text_begins_with_its_speaker(asked: Asked, spoken: str) -> None:
    assert list(read_ids(walks(asked).call().inputs["token_ids"])) == token_ids(spoken)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked("hello", voice="alloy"), "voice: expected one of S1, S2"),
        (Asked("x" * 100), "expected at most 96 bytes, found 102"),
        (Asked("hello", params={"temperature": 0.5}), "temperature: expected 0"),
        (Asked("hello", params={"max_tokens": 6}), "max_tokens: expected 7 or more"),
        (Asked("hello", params={"max_tokens": 600}), "max_tokens: expected at most"),
        (Asked("hello", params={"repetition_penalty": 1.2}), "repetition_penalty: this model"),
        (Asked("hello", params={"min_p": 0.2}), "min_p: this model"),
        (Asked("hello", params={"stop": ["x"]}), "stop is a parameter of text"),
        (Asked("  "), "the text is empty"),
    ],
)
def test_what_cannot_be_spoken_is_refused(asked: Asked, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        walks(asked)


@pytest.mark.parametrize("options", [{"guidance_scale": 0.5}, {"initial_codec_chunk_frames": 129}])
def test_options_have_bounds(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, DiaOptions)


def test_the_defaults_are_those_of_the_checkpoint() -> None:
    args = walks(Asked("hello", params={}), steps=None).call().args
    assert [args[name] for name in ("temperature", "top_p", "top_k", "guidance_scale")] == [
        1.8,
        0.95,
        45,
        3.0,
    ]
    assert args["max_tokens"] == 200
    longest = walks(Asked("hello"), steps=None, default_max_tokens=9999).call().args["max_tokens"]
    assert longest == 512 - len("[S1] hello") + len("[S1]") - 1  # max_seq_len; the speaker is one token


def test_two_contexts_have_half_of_the_pool_each() -> None:
    with pytest.raises(ClientError, match="raise max_seq_len or kv_tokens"):
        walks(Asked("hello"), kv_tokens=128)
    one = Asked("hello", options={"guidance_scale": 1})
    assert walks(one, kv_tokens=128).call().args["max_tokens"] == 60


def _changed(folder: Path, file: str, **values: Any) -> Path:
    shutil.copytree(tiny_dia(), folder)
    raw = json.loads((folder / file).read_text())
    for name, value in values.items():
        parent, _, last = name.rpartition("__")
        (raw[parent] if parent else raw)[last] = value
    (folder / file).write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("file", "values", "node", "message"),
    [
        ("config.json", {"delay_pattern": [1, 2, 3, 5]}, "decoder", "expected a delay_pattern"),
        ("config.json", {"decoder_config__cross_head_dim": 16}, "decoder", "."),
        ("dac/config.json", {"sampling_rate": 24000}, "dac", "expected 44100 Hz"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused(
    tmp_path: Path, file: str, values: dict[str, Any], node: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(_changed(tmp_path / "changed", file, **values), node)


def test_a_missing_codec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "alone"
    shutil.copytree(tiny_dia(), folder, ignore=lambda *_: ["dac"])
    monkeypatch.setattr("models.checkpoints.companions.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"descript/dac_44khz.*model_kwargs\.dac"):
        load(folder, "decoder")
    assert isinstance(load(folder, "decoder", kwargs={"dac": str(tiny_dia() / "dac")}), DiaDecoder)


def test_the_longest_sequence_is_a_text_and_an_answer() -> None:
    assert examine(tiny_dia(), "decoder") == MAX_POSITIONS
    assert DiaSettings.read(tiny_dia()).longest == 96 + 512 + 5
    assert (
        walks(Asked("x"), steps=None, max_seq_len=4111, kv_tokens=9000, default_max_tokens=9000)
        .call()
        .args["max_tokens"]
        == 512 + 5 - 1
    )
    assert DiaSettings.read(tiny_dia()).delays == (0, 2, 3, 5)
