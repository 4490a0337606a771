from pathlib import Path
from typing import Any

import pytest

from shared import config
from shared.config import ConfigError
from shared.models.registry import UnknownFamilyError
from tests.tiny import tiny_checkpoint

GROUP = {"node_names": ["prepare", "llm"], "ranks": [0]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_seq_length": 9}, r"x\.yaml: unknown key max_seq_length; did you mean 'max_seq_len'\?"),
        ({"zzz": 9}, r"x\.yaml: unknown key zzz; expected one of \['model', "),
        ({"node_groups": [GROUP | {"rank": 0}]}, r"node_groups\[0\]: unknown key rank; did you mean 'ranks'"),
        ({"node_groups": [{"node_names": ["llm"], "ranks": [0]}]}, r"no node_group places \['prepare'\]"),
        ({"node_groups": [GROUP, GROUP]}, r"\[1\]: node 'prepare' is placed already by node_groups\[0\]"),
        ({"node_groups": [GROUP | {"ranks": [0, 1]}]}, "one rank per node"),
        ({"node_groups": "none"}, r"x\.yaml: node_groups: expected an array, found 'none'"),
        ({"max_seq_len": 1}, r"x\.yaml: max_seq_len: expected an integer >= 2, found 1"),
        ({"checkpoint": "nowhere"}, r"nowhere has no config\.json"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "model": "decoder_lm",
        "checkpoint": str(tiny_checkpoint()),
        "max_seq_len": 64,
        "node_groups": [GROUP],
    }
    assert config.check(right, source="x.yaml", folder=tmp_path, name="x").nodes_of(0) == ["prepare", "llm"]

    with pytest.raises(ConfigError, match=message):
        config.check(right | changed, source="x.yaml", folder=tmp_path, name="x")


def test_a_checkpoint_folder_is_a_configuration() -> None:
    found = config.resolve(str(tiny_checkpoint()))

    assert (found.model, found.ranks, found.placement) == ("decoder_lm", [0], {"prepare": 0, "llm": 0})


def test_a_folder_of_another_kind_of_model_says_which_kind_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')

    with pytest.raises(UnknownFamilyError, match=r"decoder-only .*served, others not yet; found 'GPT2LMHead"):
        config.resolve(str(tmp_path))


def test_an_unknown_name_says_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'dmeo' is no model to serve: .*did you mean 'demo'\?"):
        config.resolve("dmeo")


def test_a_name_of_a_hub_says_how_to_get_a_folder() -> None:
    with pytest.raises(
        ConfigError, match=r"`hf download Org/M-1\.5 --local-dir M-1\.5`, then serve \./M-1\.5$"
    ):
        config.resolve("Org/M-1.5")


@pytest.mark.parametrize("path", ["./M-1.5", "../M-1.5", "/M-1.5", "models/a/M-1.5", "~/M-1.5"])
def test_a_folder_that_is_missing_is_no_name_of_a_hub(path: str) -> None:
    with pytest.raises(ConfigError, match=r"folder with a Hugging Face checkpoint$"):
        config.resolve(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gateway: {}\nlogs: {}\ngateway: {}\n", r"is no YAML: a key is there twice in line 3, column 1$"),
        ("nats: {token: sesame, token: simsim}", "a key is there twice in line 1"),
        ("nats: {token: sesame", r"is no YAML: expected ',' or '}'.* in line 1, column 21$"),
        ('name: "\\ud800"', "is no YAML: half a character in line 1, column 7$"),
        (f"kv_tokens: {2**63}", "is no YAML: an integer beyond 64 bits in line 1, column 12$"),
        ("- sesame", "expected keys and values, found an array of 1 item"),
        ("", "expected keys and values, found null"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_in_one_line_without_repeating_it(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message) as raised:
        config.resolve(str(file))

    assert "sesame" not in raised.value.message
    assert "\n" not in raised.value.message
