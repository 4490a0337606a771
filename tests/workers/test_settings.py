from typing import Any

import pytest

from configs.deployment import ConfigError
from workers import settings


def test_without_model_kwargs_everything_suits_the_device() -> None:
    found = settings.parse({})

    assert (found.dtype, found.device, found.block_size) == ("auto", "auto", 16)
    assert (found.max_sequences_on("cpu"), found.max_step_tokens_on("cpu")) == (64, 64 + 2048)
    assert (found.max_sequences_on("cuda"), found.max_step_tokens_on("cuda")) == (256, 256 + 4096)


def test_what_is_set_is_taken() -> None:
    given = {"dtype": "bfloat16", "device": "cuda:1", "block_size": 4, "max_step_tokens": 32, "max_sequences": 8}

    found = settings.parse(given)

    assert (found.dtype, found.device, found.block_size) == ("bfloat16", "cuda:1", 4)
    assert (found.max_sequences_on("cuda"), found.max_step_tokens_on("cuda")) == (8, 32)


def test_many_rows_raise_the_budget_of_a_step() -> None:
    assert settings.parse({"max_sequences": 3000}).max_step_tokens_on("cpu") == 3000 + 2048


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtyp": "auto"}, "model_kwargs: unknown key dtyp; did you mean 'dtype'"),
        ({"zzz": 1}, "model_kwargs: unknown key zzz; expected one of"),
        (
            {"dtype": "int8"},
            r"model_kwargs\.dtype: expected one of auto, bfloat16, float16, float32, found 'int8'",
        ),
        ({"device": "tpu"}, "model_kwargs.device: expected a string that matches .*, found 'tpu'"),
        ({"max_sequences": 0}, "model_kwargs.max_sequences: expected an integer >= 1, found 0"),
        ({"block_size": "16"}, "model_kwargs.block_size: expected an integer, found '16'"),
        ({"warm_prefixes": ["a"], "prefix_cache": False}, "warm_prefixes: expected none with prefix_cache false"),
        ({"warm_prefixes": [""]}, r"model_kwargs.warm_prefixes\[0\]"),
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
    with pytest.raises(ConfigError, match="max_step_tokens is 4: expected at least max_sequences, which is 64"):
        settings.parse({"max_step_tokens": 4}).max_step_tokens_on("cpu")
