"""What is said later wins, and is known by where it was said."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.deployment import SECRETS, ConfigError
from configs.files import Base
from dalsegno.config import layers
from dalsegno.config.layers import DEFAULT, KEYS, Effective
from tests.tiny import tiny_checkpoint

HERE = Path("/here")


def base(**changed: Any) -> Base:
    values: dict[str, Any] = {
        "model": "decoder_lm",
        "checkpoint": str(tiny_checkpoint()),
        "max_seq_len": 64,
        "node_groups": [{"node_names": ["prepare", "llm"], "ranks": [0]}],
    }
    return Base(values=values | changed, source="x.yaml", folder=Path("/there"), name="x")


def effective(
    *flags: str, environ: dict[str, str] | None = None, here: Path = HERE, **changed: Any
) -> Effective:
    settings = [*layers.of_environment(environ or {}), *map(layers.of_flag, flags)]
    return layers.effective(base(**changed), settings, here)


def test_the_environment_wins_over_the_file_and_a_flag_over_both() -> None:
    environ = {"DALSEGNO_GATEWAY_PORT": "9001"}
    told = [
        effective(),
        effective(gateway={"port": 9000}),
        effective(gateway={"port": 9000}, environ=environ),
        effective("gateway.port=9002", gateway={"port": 9000}, environ=environ),
        effective("gateway.port=9002", "gateway.port=9003"),
    ]

    assert [(one.config.gateway.port, one.sources["gateway.port"]) for one in told] == [
        (8000, DEFAULT),
        (9000, "x.yaml"),
        (9001, "DALSEGNO_GATEWAY_PORT"),
        (9002, "--set"),
        (9003, "--set"),
    ]


def test_what_is_said_of_one_key_leaves_the_others_of_its_section() -> None:
    found = effective("gateway.port=9", gateway={"max_tokens": 7}, logs=None).config.gateway

    assert (found.port, found.max_tokens) == (9, 7)


def test_the_file_is_left_as_it_was_read() -> None:
    written = base(gateway={"port": 9000}, model_kwargs={"max_sequences": 1})
    layers.effective(
        written, [layers.of_flag("gateway.port=9"), layers.of_flag("model_kwargs.dtype=auto")], HERE
    )

    assert written.values["gateway"] == {"port": 9000}
    assert written.values["model_kwargs"] == {"max_sequences": 1}


def test_each_key_of_a_map_is_a_value_of_its_own() -> None:
    found = effective(
        "model_kwargs.block_size=8",
        environ={"DALSEGNO_MODEL_KWARGS": "{dtype: float32, max_sequences: 2}"},
        model_kwargs={"device": "cpu", "max_sequences": 1},
    )

    assert found.config.model_kwargs == {
        "device": "cpu",
        "max_sequences": 2,
        "dtype": "float32",
        "block_size": 8,
    }
    assert {key: source for key, source in found.sources.items() if key.startswith("model_kwargs.")} == {
        "model_kwargs.device": "x.yaml",
        "model_kwargs.max_sequences": "DALSEGNO_MODEL_KWARGS",
        "model_kwargs.dtype": "DALSEGNO_MODEL_KWARGS",
        "model_kwargs.block_size": "--set",
    }


@pytest.mark.parametrize(
    ("in_file", "variable", "flag"),
    [
        ("max_rows", "max_sequences", "max_rows"),
        ("max_sequences", "max_rows", "max_sequences"),
        ("max_rows", "max_rows", "max_sequences"),
    ],
)
def test_a_layer_replaces_the_value_of_a_key_under_its_old_or_its_current_name(
    in_file: str, variable: str, flag: str
) -> None:
    environ = {"DALSEGNO_MODEL_KWARGS": f"{{{variable}: 2}}"}
    found = [
        effective(environ=environ, model_kwargs={in_file: 1}),
        effective(f"model_kwargs.{flag}=3", environ=environ, model_kwargs={in_file: 1}),
    ]

    assert [one.config.model_kwargs for one in found] == [{"max_sequences": 2}, {"max_sequences": 3}]
    assert [one.sources["model_kwargs.max_sequences"] for one in found] == ["DALSEGNO_MODEL_KWARGS", "--set"]
    assert all("model_kwargs.max_rows" not in one.sources for one in found)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("name", "123", "123"),
        ("kv_tokens", "null", None),
        ("kv_tokens", "", None),
        ("kv_tokens", "4096", 4096),
        ("gateway.request_timeout_s", "1e2", 100.0),
        ("gateway.cors_origins", "https://a.example, *", ["https://a.example", "*"]),
        ("gateway.cors_origins", "[https://a.example]", ["https://a.example"]),
        ("gateway.cors_origins", "", []),
        ("gateway.cors_origins", "null", []),
        ("gateway.cors_origins", '["null"]', ["null"]),
        ("gateway.security_headers", "0", False),
        ("gateway.security_headers", "True", True),
        ("logs.level", "error", "error"),
        ("nats.url", "", None),
        ("node_groups", "[{node_names: [llm], ranks: [0]}]", [{"node_names": ["llm"], "ranks": [0]}]),
        ("model_kwargs.device", "cuda:0", "cuda:0"),
        ("model_kwargs.max_sequences", "8", 8),
    ],
)
def test_a_text_is_read_as_its_key_takes_it(key: str, text: str, value: object) -> None:
    found = layers.setting(key, text, "--set")

    assert found.value == value
    assert type(found.value) is type(value)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("gateway.prot=1", r"--set: unknown key gateway\.prot; did you mean 'gateway\.port'\?"),
        ("port=1", r"--set: unknown key port; did you mean 'gateway\.port'\?"),
        ("max_seq_length=1", "--set: unknown key max_seq_length; did you mean 'max_seq_len'"),
        ("gateway={}", r"unknown key gateway; it is a section: expected one of \['gateway\.host', "),
        ("zzz=1", r"--set: unknown key zzz; expected one of \['model', 'checkpoint'"),
        ("gateway.port", "--set gateway.port: expected key=value"),
        ("gateway.port=many", "--set: gateway.port: expected an integer, found 'many'"),
        (f"max_attempts={2**63}", "--set: max_attempts: expected an integer of 64 bits, found 9223372036854"),
        (
            f"model_kwargs.max_sequences={2**63}",
            "--set: model_kwargs.max_sequences is no YAML: an integer beyond 64 b",
        ),
        ("gateway.port=70000", "--set: gateway.port: expected an integer <= 65535, found 70000"),
        ("gateway.drain_s=inf", "--set: gateway.drain_s: expected a number <= 604800, found inf"),
        ("gateway.drain_s=nan", "--set: gateway.drain_s: expected a number"),
        ("gateway.cors_origins=[1]", r"--set: gateway\.cors_origins\[0\]: expected a string, found 1"),
        ("logs.format=xml", "--set: logs.format: expected one of human, json, found 'xml'"),
        ("model_kwargs.max_sequences=[", "--set: model_kwargs.max_sequences is no YAML: .*line 1"),
        ("model_kwargs=5", "--set: model_kwargs: expected an object, found 5"),
        ("name=\udcff", "--set: name: expected text in UTF-8, found other bytes"),
        ("nats.token=sesame", "--set: nats.token is a secret, .*: put it into DALSEGNO_NATS_TOKEN$"),
        (
            "gateway.api_keys=sesame",
            "put it into DALSEGNO_GATEWAY_API_KEYS or into the file of gateway.api_k",
        ),
    ],
)
def test_a_flag_that_cannot_be_meant_says_what_could(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        layers.of_flag(flag)

    assert "sesame" not in raised.value.message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("DALSEGNO_GATWAY_PORT", "1", "variable DALSEGNO_GATWAY_PORT; did you mean 'DALSEGNO_GATEWAY_PORT'"),
        ("DALSEGNO_QQQ", "1", r"variable DALSEGNO_QQQ; expected one of \['DALSEGNO_MODEL', "),
        ("DALSEGNO_GATEWAY_PORT", "x", "DALSEGNO_GATEWAY_PORT: gateway.port: expected an integer, found 'x'"),
        (
            "DALSEGNO_GATEWAY_API_KEYS",
            "[{sesame: 1}]",
            r"API_KEYS: gateway\.api_keys\[0\]: expected a string, f",
        ),
    ],
)
def test_a_variable_that_cannot_be_meant_says_what_could(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        layers.of_environment({name: text})

    assert "sesame" not in raised.value.message


def test_an_empty_variable_and_those_of_others_say_nothing() -> None:
    assert not layers.of_environment(
        {
            "DALSEGNO_GATEWAY_PORT": "",
            "HOME": "/",
            "DALSEGNO_SERVICE_HOST": "10.0.0.1",
            "DALSEGNO_GATEWAY_SERVICE_PORT_HTTP": "8000",
            "DALSEGNO_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
            "DALSEGNO_NATS_PORT": "tcp://10.0.0.1:4222",
        }
    )


def test_a_wrong_value_in_the_file_is_the_files() -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml: gateway\.port: expected an integer <= 65535, found 7"):
        effective("gateway.max_tokens=5", gateway={"port": 70000})
    with pytest.raises(ConfigError, match=r"^x\.yaml: gateway: expected an object"):
        effective("gateway.max_tokens=5", gateway=5)
    with pytest.raises(ConfigError, match=r"^x\.yaml: gateway: unknown key prot; did you mean 'port'\?"):
        effective(gateway={"prot": 1})
    with pytest.raises(ConfigError, match=r"^x\.yaml: unknown key port; did you mean 'gateway\.port'\?"):
        effective(port=1)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("walk_timeouts_s.decode=x", "walk_timeouts_s.decode: expected a number, found 'x'"),
        ("walk_timeouts_s={prefill: 9, decode: 0}", "walk_timeouts_s.decode: expected a number > 0, found 0"),
        ("devices={0:cpu}", "devices.0:cpu: expected a rank, an integer >= 0, found '0:cpu'"),
        ("devices={0: 1}", "devices.0: expected auto, cpu, mps, cuda or cuda:N, found 1"),
    ],
)
def test_a_wrong_value_in_a_map_is_told_by_its_key_and_by_where_it_was_said(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        effective(flag, walk_timeouts_s={"prefill": 9})
    assert raised.value.message == f"--set: {message}"

    with pytest.raises(ConfigError) as raised:
        effective(walk_timeouts_s={"decode": "x"})
    assert raised.value.message == "x.yaml: walk_timeouts_s.decode: expected a number, found 'x'"


def test_what_does_not_fit_the_model_is_told_by_where_it_was_said() -> None:
    with pytest.raises(ConfigError, match=r"^--set: checkpoint /here/nowhere does not exist"):
        effective("checkpoint=nowhere")
    with pytest.raises(ConfigError, match=r"^DALSEGNO_NODE_GROUPS: no node_group places"):
        effective(environ={"DALSEGNO_NODE_GROUPS": "[{node_names: [prepare], ranks: [0]}]"})
    with pytest.raises(ConfigError, match=r"^--set: devices\.0: expected auto, cpu, mps, cuda or cuda:N"):
        effective("devices.0=gpu")


def test_a_secret_in_the_file_is_not_repeated_when_it_does_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"gateway\.api_keys: expected an array, found a value of"
    ) as raised:
        effective(gateway={"api_keys": "sesame"})

    assert "sesame" not in raised.value.message


def test_the_mask_is_no_secret() -> None:
    for changed in ({"nats": {"token": "***"}}, {"gateway": {"api_keys": ["web=***"]}}):
        with pytest.raises(ConfigError, match=r"\*\*\* stands for a secret that was not printed"):
            effective(**changed)


def test_a_path_is_relative_to_where_it_was_said() -> None:
    told = [
        effective(data_dir="data"),
        effective("data_dir=data"),
        effective(environ={"DALSEGNO_DATA_DIR": "data"}),
        effective("data_dir=/data", data_dir="data"),
        effective(gateway={"api_keys_file": "data"}),
    ]

    assert [one.config.data_dir or one.config.gateway.api_keys_file for one in told] == [
        "/there/data", "/here/data", "/here/data", "/data", "/there/data",
    ]  # fmt: skip


def test_every_key_has_a_variable_of_its_own() -> None:
    assert len({key.variable for key in KEYS.values()}) == len(KEYS)
    assert KEYS["gateway.port"].variable == "DALSEGNO_GATEWAY_PORT"
    assert set(KEYS) >= SECRETS


def test_how_processes_run_is_nothing_that_decisions_depend_on() -> None:
    plain = effective().config.digest

    assert (
        effective("gateway.port=1", "logs.level=error", "data_dir=x", "nats.prefix=y").config.digest == plain
    )
    assert effective("max_attempts=1").config.digest != plain


@pytest.mark.slow
@given(st.text(), st.sampled_from(sorted(KEYS)))
def test_any_text_is_read_or_refused(text: str, key: str) -> None:
    try:
        found = layers.setting(key, text, KEYS[key].variable)
    except ConfigError:
        return
    values, sources = layers.overlay(base(), [found], HERE)
    assert sources[key] == KEYS[key].variable
    assert set(values) <= {one.partition(".")[0] for one in KEYS}


def test_so_is_one_in_the_maps_of_a_family() -> None:
    said: dict[str, Any] = {"model": "orpheus"}
    said["node_groups"] = [{"node_names": ["LLM", "snac_decoder"], "ranks": [0]}]

    def snac(*flags: str, **changed: Any) -> object:
        return effective(*flags, **said, **changed).config.model_kwargs["snac"]

    assert snac(model_kwargs={"snac": "snac"}) == "/there/snac"
    assert snac("model_kwargs.snac=../snac") == "/snac"
    assert snac("model_kwargs={snac: snac}") == "/here/snac"
    assert snac("model_kwargs.snac=/snac", model_kwargs={"snac": "snac"}) == "/snac"


def test_a_rank_is_a_number_in_the_file_and_text_on_the_command_line() -> None:
    groups = [{"node_names": ["prepare"], "ranks": [0]}, {"node_names": ["llm"], "ranks": [1]}]

    found = effective("devices.1=cuda:1", node_groups=groups, devices={0: "cpu", 1: "cpu"})

    assert found.config.devices == {0: "cpu", 1: "cuda:1"}
    assert (found.sources["devices.0"], found.sources["devices.1"]) == ("x.yaml", "--set")
