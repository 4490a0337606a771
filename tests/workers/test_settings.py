import json
from pathlib import Path
from typing import Any

import pytest

from configs.deployment import ConfigError
from dalsegno.config import resolve
from tests.tiny import tiny_checkpoint
from workers import settings


def test_without_model_kwargs_everything_suits_the_device() -> None:
    found = settings.parse({})

    assert (found.dtype, found.device, found.block_size) == ("auto", "auto", 16)
    assert (found.max_sequences_on("cpu"), found.max_step_tokens_on("cpu")) == (64, 64 + 2048)
    assert (found.max_sequences_on("cuda"), found.max_step_tokens_on("cuda")) == (256, 256 + 4096)


def test_what_is_set_is_taken() -> None:
    given = {
        "dtype": "bfloat16",
        "device": "cuda:1",
        "block_size": 4,
        "max_step_tokens": 32,
        "max_sequences": 8,
    }

    found = settings.parse(given)

    assert (found.dtype, found.device, found.block_size) == ("bfloat16", "cuda:1", 4)
    assert (found.max_sequences_on("cuda"), found.max_step_tokens_on("cuda")) == (8, 32)


def test_many_rows_raise_the_budget_of_a_step() -> None:
    assert settings.parse({"max_sequences": 3000}).max_step_tokens_on("cpu") == 3000 + 2048


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtyp": "auto"}, "model_kwargs: unknown key dtyp; did you mean 'dtype'"),
        ({"max_rowz": 1}, "model_kwargs: unknown key max_rowz; did you mean 'max_sequences'"),
        ({"zzz": 1}, "model_kwargs: unknown key zzz; expected one of"),
        (
            {"dtype": "int8"},
            r"model_kwargs\.dtype: expected one of auto, bfloat16, float16, float32, found 'int8'",
        ),
        ({"device": "tpu"}, "model_kwargs.device: expected a string that matches .*, found 'tpu'"),
        ({"max_sequences": 0}, "model_kwargs.max_sequences: expected an integer >= 1, found 0"),
        ({"block_size": "16"}, "model_kwargs.block_size: expected an integer, found '16'"),
        (
            {"warm_prefixes": ["a"], "prefix_cache": False},
            "warm_prefixes: expected none with prefix_cache false",
        ),
        ({"warm_prefixes": [""]}, r"model_kwargs.warm_prefixes\[0\]"),
        (
            {"quantize": "int3"},
            r"model_kwargs\.quantize: expected one of auto, fp8, int4, int8, none, found 'int3'",
        ),
        ({"quantize": "int4", "kernels": "torch"}, "quantize: expected kernels auto with int4, found torch"),
        (
            {"quantize": "fp8", "calibration_text": "a.txt"},
            "calibration_text: expected none without quantize",
        ),
        ({"kv_cache": "int4"}, "kv_cache: expected one of auto, int8, found 'int4'"),
        ({"kv_cache": "int8", "kernels": "torch"}, "kv_cache: expected kernels auto with int8, found torch"),
        ({"calibration_text": "a.txt"}, "calibration_text: expected none without quantize: int8 or int4"),
    ],
)
def test_a_wrong_setting_is_told_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.parse(kwargs)


def test_a_family_says_which_keys_are_its_own() -> None:
    found = settings.parse({"vocoder": "./snac", "max_sequences": 8}, {"vocoder"})

    assert found.max_sequences_on("cpu") == 8
    with pytest.raises(ConfigError, match="unknown key vocader; did you mean 'vocoder'"):
        settings.parse({"vocader": "./snac"}, {"vocoder"})
    with pytest.raises(ConfigError, match="unknown key vocoder; expected one of"):
        settings.parse({"vocoder": "./snac"})


def test_a_step_must_have_a_token_for_every_row() -> None:
    with pytest.raises(
        ConfigError, match="max_step_tokens is 4: expected at least max_sequences, which is 64"
    ):
        settings.parse({"max_step_tokens": 4}).max_step_tokens_on("cpu")


# ---- renamed keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("stretch", "decode_slowdown_limit", 2.5),
        ("max_rows", "max_sequences", 8),
        ("speculate", "speculative_tokens", 4),
        ("draft", "draft_model", "/models/small"),
        ("warm", "warm_prefixes", ["a"]),
    ],
)
def test_an_old_name_is_accepted_with_a_warning_that_names_the_new_one(
    old: str, new: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert settings.parse({old: value}) == settings.parse({new: value})
    [warning] = caplog.messages
    assert f"model_kwargs.{old} is now called {new}" in warning


def test_an_old_and_a_new_name_together_are_refused_with_both_names() -> None:
    with pytest.raises(ConfigError, match="expected max_sequences alone, found max_rows too"):
        settings.parse({"max_rows": 8, "max_sequences": 8})


def test_a_family_keeps_a_key_of_its_own_with_an_old_name() -> None:
    assert settings.parse({"warm": True}, {"warm"}).warm_prefixes == []


def test_a_deployment_has_the_new_names_and_absolute_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.yaml"
    raw = {
        "model": "decoder_lm",
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 64,
        "node_groups": [{"node_names": ["prepare", "llm"], "ranks": [0]}],
        "model_kwargs": {"draft": "small", "speculate": 2},
    }
    file.write_text(json.dumps(raw))

    found = resolve.effective(str(file), resolve.settings_of(set_=["model_kwargs.stretch=3"]))

    expected = {"draft_model": str(tmp_path / "small"), "speculative_tokens": 2, "decode_slowdown_limit": 3}
    assert found.config.model_kwargs == expected
    assert found.sources["model_kwargs.draft_model"] == str(file)
    assert found.sources["model_kwargs.decode_slowdown_limit"] == "--set"
    assert "model_kwargs.stretch" not in found.sources
    assert "--set: model_kwargs.stretch is now called decode_slowdown_limit" in caplog.text

    file.write_text(json.dumps(raw | {"model_kwargs": {"draft": "a", "draft_model": "b"}}))
    with pytest.raises(ConfigError, match="model_kwargs: expected draft_model alone, found draft too"):
        resolve.effective(str(file), ())
