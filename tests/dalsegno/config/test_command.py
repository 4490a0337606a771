"""What `dalsegno config` prints can be served, says where all is from, and holds no secret."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from configs import checks
from dalsegno.cli import main
from dalsegno.config import command
from dalsegno.config.layers import KEYS
from tests.tiny import tiny_checkpoint

SECRETS = {"DALSEGNO_NATS_TOKEN": "sesame", "DALSEGNO_GATEWAY_API_KEYS": "web=unlatch,c2VzYW1lIG9wZW4hIQ=="}


def show(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["config", *args], env=env)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A deployment's YAML file."""
    (tmp_path / "checkpoint").symlink_to(tiny_checkpoint(), target_is_directory=True)
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model: decoder_lm\ncheckpoint: checkpoint\nmax_seq_len: 64\n"
        "node_groups: [{node_names: [prepare, llm], ranks: [0]}]\n"
        "model_kwargs: {device: cpu}\ngateway: {port: 9000, max_tokens: 100}\n"
    )
    return path


def test_what_is_printed_can_be_saved_and_is_the_same(file: Path, tmp_path: Path) -> None:
    flags = ("--set", "model_kwargs.dtype=float32", "--set", "name=a: b", "--port", "9002")
    shown = show(str(file), *flags, env={"DALSEGNO_GATEWAY_CORS_ORIGINS": "https://a.example,*"})
    saved = tmp_path / "elsewhere" / "saved.yaml"
    saved.parent.mkdir()
    saved.write_text(shown.stdout)

    found = checks.resolve(str(saved))

    assert (found.name, found.gateway.port, found.gateway.max_tokens) == ("a: b", 9002, 100)
    assert found.gateway.cors_origins == ["https://a.example", "*"]
    assert found.model_kwargs == {"device": "cpu", "dtype": "float32"}
    first, again = (
        json.loads(show(str(file), *flags, "--json").stdout),
        json.loads(show(str(saved), "--json").stdout),
    )
    del again["config"]["gateway"]["cors_origins"], first["config"]["gateway"]["cors_origins"]
    assert again["config"] == first["config"]


def test_every_key_is_printed_with_where_it_is_from(file: Path) -> None:
    env = {"DALSEGNO_GATEWAY_PORT": "9001", "DALSEGNO_MAX_ATTEMPTS": "2"}
    told = json.loads(
        show(str(file), "--set", "gateway.port=9002", "--log-level", "error", "--json", env=env).stdout
    )

    assert set(told["sources"]) - {"model_kwargs.device"} == set(KEYS)
    assert told["sources"]["gateway.port"] == "--set"
    assert told["sources"]["max_attempts"] == "DALSEGNO_MAX_ATTEMPTS"
    assert told["sources"]["logs.level"] == "--log-level"
    assert told["sources"]["gateway.max_tokens"] == told["sources"]["model_kwargs.device"] == str(file)
    assert told["sources"]["kv_tokens"] == "default"
    lines = show(str(file), env=env).stdout.splitlines()
    assert [" ".join(line.split()) for line in lines if " port:" in line] == [
        "port: 0 # from default",  # the data plane's
        "port: 9001 # from DALSEGNO_GATEWAY_PORT",
    ]


def test_no_secret_is_printed_and_what_is_saved_says_nothing_in_its_place(file: Path) -> None:
    for flags in ((), ("--json",)):
        shown = show(str(file), *flags, env=SECRETS).stdout
        assert "web=***" in shown
        assert not any(secret in shown for secret in ("sesame", "unlatch", "c2Vz"))

    saved = yaml.safe_load(show(str(file), env=SECRETS).stdout)
    assert "token" not in saved["nats"]
    assert "api_keys" not in saved["gateway"]


def test_what_is_saved_without_the_files_secrets_does_not_serve_without_them(
    file: Path, tmp_path: Path
) -> None:
    file.write_text(file.read_text().replace("port: 9000", "port: 9000, api_keys: [web=sesame]"))
    saved = tmp_path / "saved.yaml"
    saved.write_text(show(str(file)).stdout)

    refused = show(str(saved))
    served = show(str(saved), "--json", env={"DALSEGNO_GATEWAY_API_KEYS": "app=open"})

    assert "sesame" not in saved.read_text()
    assert refused.exit_code == 1
    assert "gateway.api_keys: *** stands for a secret that was not printed; set it" in refused.stderr
    assert json.loads(served.stdout)["config"]["gateway"]["api_keys"] == ["app=***"]


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--set", "gateway.prot=1"], 2, "unknown key gateway.prot; did you mean 'gateway.port'?"),
        (["--set", "gateway.port=x"], 2, "gateway.port: expected an integer, found 'x'"),
        (["--set", "nats.token=x"], 2, "put it into DALSEGNO_NATS_TOKEN"),
        (
            ["--set", "model_kwargs.max_sequencez=1"],
            1,
            "--set: model_kwargs: unknown key max_sequencez; did you mean 'max_sequences'",
        ),
        (
            ["--set", "model_kwargs.max_sequences=0"],
            1,
            "--set: model_kwargs.max_sequences: expected an integer >= 1, found",
        ),
        (["--set", "model_kwargs.a.b=0"], 1, "Error: --set: model_kwargs: unknown key a.b; expected one of"),
        (["--set", "gateway.api_keys_file=/no/keys"], 1, "gateway.api_keys_file: cannot read /no/keys"),
        (["--set", "nats.token_file=/no/token"], 1, "nats.token_file: cannot read /no/token"),
        (["--nats", "nats://user:pass@host"], 1, "address contains a secret"),
    ],
)
def test_what_could_not_be_served_is_refused(file: Path, args: list[str], status: int, said: str) -> None:
    ended = show(str(file), *args)

    assert (ended.exit_code, ended.stdout) == (status, "")
    assert said in " ".join(ended.stderr.split())
    assert "pass@" not in ended.stderr


@pytest.mark.parametrize("unknown", ["DALSEGNO_GATEWAY_PRT", "DALSEGNO_PORT"])
def test_an_unknown_variable_is_refused_with_the_nearest(file: Path, unknown: str) -> None:
    ended = show(str(file), env={unknown: "1"})

    assert ended.exit_code == 1
    assert ended.stderr == (
        f"Error: unknown environment variable {unknown}; did you mean 'DALSEGNO_GATEWAY_PORT'?\n"
    )


def test_an_unknown_family_says_where_it_was_said(file: Path) -> None:
    ended = show(str(file), env={"DALSEGNO_MODEL": "demo"})

    assert ended.exit_code == 1
    assert ended.stderr.startswith("Error: DALSEGNO_MODEL: model 'demo' is unknown: expected one of ")


def test_the_name_of_a_key_is_no_part_of_its_secret() -> None:
    assert [command.masked(key) for key in ("web=open", "open", "c2VzYW1lIG9wZW4hIQ==")] == [
        "web=***",
        "***",
        "***",
    ]
