from pathlib import Path
from typing import Any

import pytest

from configs import checks, files
from configs.deployment import ConfigError, DeploymentConfig
from models.checkpoints.hub_cache import HubName
from models.registry import UnknownFamilyError
from tests.tiny import tiny_checkpoint
from tests.tiny.masked_diffusion import tiny_llada
from tests.tiny.orpheus import tiny_orpheus

GROUP = {"node_names": ["prepare", "llm"], "ranks": [0]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_seq_length": 9}, r"x\.yaml: unknown key max_seq_length; did you mean 'max_seq_len'\?"),
        ({"zzz": 9}, r"x\.yaml: unknown key zzz; expected one of \['model', "),
        ({"node_groups": [GROUP | {"rank": 0}]}, r"node_groups\[0\]: unknown key rank; did you mean 'ranks'"),
        (
            {"node_groups": [{"node_names": ["prepare"], "ranks": [0]}]},
            r"x\.yaml: no node_group places \['llm'\]",
        ),
        ({"node_groups": [GROUP, GROUP]}, r"\[1\]: node 'prepare' is placed already by node_groups\[0\]"),
        ({"node_groups": [GROUP | {"tp_size": 2}]}, r"x\.yaml: node_groups\[0\]: 1 ranks do not divide by"),
        ({"devices": {1: "cpu"}}, r"devices: expected ranks of node_groups, which are \[0\], found \[1\]"),
        ({"devices": {"0": "gpu"}}, r"devices\.0: expected auto, cpu, mps, cuda or cuda:N, found 'gpu'"),
        ({"devices": {"llm": "cpu"}}, r"devices\.llm: expected a rank, an integer >= 0, found 'llm'"),
        ({"devices": {0: 1}}, r"devices\.0: expected auto, cpu, mps, cuda or cuda:N, found 1"),
        (
            {"data_plane": {"transport": ["shm"]}},
            r"data_plane: unknown key transport; did you mean 'transports'",
        ),
        (
            {"data_plane": {"transports": ["rdma"]}},
            r"transports\[0\]: expected one of cuda_ipc, local, nixl, ",
        ),
        ({"node_groups": "none"}, r"x\.yaml: node_groups: expected an array, found 'none'"),
        ({"max_seq_len": 1}, r"x\.yaml: max_seq_len: expected an integer >= 2, found 1"),
        ({"checkpoint": "nowhere"}, r"x\.yaml: checkpoint \S+nowhere does not exist$"),
        (
            {"walk_timeouts_s": {"decod": 1}},
            r"walk_timeouts_s: expected walks of decoder_lm \(.*\), found 'decod'; did you mean 'decode'\?$",
        ),
        (
            {"voices": ["anna"]},
            r"voices: expected none, because decoder_lm has no voices; leave the key out$",
        ),
        (
            {
                "adapters": {"sql": "sql"},
                "node_groups": [
                    {"node_names": ["prepare"], "ranks": [0]},
                    {"node_names": ["llm"], "ranks": [0, 1], "tp_size": 2},
                ],
            },
            r"adapters: expected none with tp_size above 1: shared layers take no LoRA adapters$",
        ),
        (
            {"adapters": {"a:b": "sql"}},
            r"x\.yaml: adapters: expected names of 1 to 64 letters, digits, _ and -, found 'a:b'$",
        ),
        ({"checkpoint": "."}, r"x\.yaml: checkpoint \S+ has no config\.json$"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "model": "decoder_lm",
        "checkpoint": str(tiny_checkpoint()),
        "max_seq_len": 64,
        "node_groups": [GROUP],
    }
    assert checks.check(right, source="x.yaml", folder=tmp_path, name="x").nodes_of(0) == [
        "prepare",
        "llm",
    ]

    with pytest.raises(ConfigError, match=message):
        checks.check(right | changed, source="x.yaml", folder=tmp_path, name="x")


def test_a_checkpoint_folder_is_a_configuration() -> None:
    found = checks.resolve(str(tiny_checkpoint()))

    assert (found.model, found.ranks, found.placement) == ("decoder_lm", [0], {"prepare": 0, "llm": 0})


def test_the_context_of_llada_is_under_a_name_of_its_own() -> None:
    found = checks.resolve(str(tiny_llada()))

    assert (found.model, found.max_seq_len) == ("masked_diffusion", 512)


def test_a_folder_of_another_kind_of_model_says_which_kind_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2DoubleHeadsModel"]}')

    with pytest.raises(UnknownFamilyError, match=r"found 'GPT2Double.*asked: .*decoder_lm \(decoder-only "):
        checks.resolve(str(tmp_path))


def test_an_unknown_name_says_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'dmeo' is no model to serve: .*did you mean 'demo'\?"):
        checks.resolve("dmeo")


def test_a_name_of_a_hub_is_fetched(tmp_path: Path) -> None:
    asked = []

    def fetch(name: HubName) -> Path:
        asked.append(name)
        return tiny_checkpoint()

    found = files.read("Org/M-1.5@v1", fetch)

    assert asked == [HubName(repository="Org/M-1.5", revision="v1")]
    assert found.values["model"] == "decoder_lm"


@pytest.mark.parametrize("path", ["./M-1.5", "../M-1.5", "/M-1.5", "models/a/M-1.5", "~/M-1.5"])
def test_a_folder_that_is_missing_is_no_name_of_a_hub(path: str) -> None:
    assert HubName.parse(path) is None
    with pytest.raises(ConfigError, match=r"a model on a hub \(org/name\)$"):
        checks.resolve(path)


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
        checks.resolve(str(file))

    assert "sesame" not in raised.value.message
    assert "\n" not in raised.value.message


def test_a_file_that_cannot_be_read_is_told_with_the_reason_and_named_once(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    with pytest.raises(ConfigError) as raised:
        checks.resolve(str(file))
    assert raised.value.message == f"cannot read the configuration {file}: No such file or directory"

    file.write_bytes(b"model: \xff")
    with pytest.raises(ConfigError) as raised:
        checks.resolve(str(file))
    assert raised.value.message == f"cannot read the configuration {file}: it is no text in UTF-8"


# ---- a checkpoint that is not named --------------------------------------------------------------------


SPEAKING: dict[str, Any] = {
    "model": "orpheus",
    "max_seq_len": 64,
    "node_groups": [{"node_names": ["LLM", "snac_decoder"], "ranks": [0]}],
}


def downloaded(cache: Path, commit: str = "c0ffee") -> Path:
    """What the hub's tools leave of the family's usual repository."""
    folder = cache / "models--canopylabs--orpheus-3b-0.1-ft"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text("{}")
    return folder / "snapshots" / commit


def test_where_none_is_named_the_familys_own_is_taken_as_it_was_downloaded_last(tmp_path: Path) -> None:
    downloaded(tmp_path, "0ld")
    newest = downloaded(tmp_path)

    found = checks.check(SPEAKING, source="x.yaml", folder=tmp_path, name="x", hub_cache=tmp_path)

    assert found.checkpoint == str(newest)


def test_where_it_was_not_downloaded_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"x\.yaml: no checkpoint is named, and canopylabs/orpheus-3b-0\.1-ft was not downloaded: "
        rf"not found in {tmp_path}; get it with `hf download canopylabs/orpheus-3b-0\.1-ft`, "
        r"or name a folder in the key checkpoint, or with --checkpoint",
    ):
        checks.check(SPEAKING, source="x.yaml", folder=tmp_path, name="x", hub_cache=tmp_path)


def test_a_family_without_a_usual_one_needs_one_that_is_named(tmp_path: Path) -> None:
    raw = {"model": "decoder_lm", "max_seq_len": 64, "node_groups": [GROUP]}
    with pytest.raises(
        ConfigError, match=r"checkpoint: expected a folder, found nothing; name a folder in the key"
    ):
        checks.check(raw, source="x.yaml", folder=tmp_path, name="x", hub_cache=tmp_path)


def test_a_file_for_a_family_nobody_serves_says_which_are_served(tmp_path: Path) -> None:
    raw = {"model": "higgs_audio", "max_seq_len": 64, "kv_cache": {"page_size": 128}}
    with pytest.raises(
        UnknownFamilyError,
        match=r"x\.yaml: model 'higgs_audio' is unknown: expected one of \[.*'decoder_lm', .*'orpheus'",
    ):
        checks.check(raw, source="x.yaml", folder=tmp_path, name="x")


# ---- devices -------------------------------------------------------------------------------------------


def test_declared_voices_precede_those_of_the_family(tmp_path: Path) -> None:
    nodes = ["prepare", "LLM", "snac_decoder"]
    given = {
        "model": "orpheus",
        "checkpoint": str(tiny_orpheus()),
        "max_seq_len": 64,
        "node_groups": [{"node_names": nodes, "ranks": [0]}],
    }

    def checked(**changed: Any) -> DeploymentConfig:
        return checks.check(given | changed, source="x.yaml", folder=tmp_path, name="x")

    assert checked().known_voices[0] == "tara"
    assert checked(voices=["Ève", "leo"]).known_voices[:3] == ("Ève", "leo", "tara")
    with pytest.raises(ConfigError, match=r"voices: expected names of 1 to 64 letters, .*, found 'a: b'"):
        checked(voices=["a: b"])
    with pytest.raises(ConfigError, match=r"adapters: expected none, because orpheus takes no LoRA adapters"):
        checked(adapters_at_runtime=True)


def test_a_ranks_device_is_its_own_else_the_models_else_found(tmp_path: Path) -> None:
    def devices(**changed: Any) -> list[str]:
        raw = SPEAKING | {"checkpoint": str(tiny_checkpoint())} | changed
        raw["node_groups"] = [
            {"node_names": ["LLM"], "ranks": [0]},
            {"node_names": ["snac_decoder"], "ranks": [1]},
        ]
        found = checks.check(raw, source="x.yaml", folder=tmp_path, name="x")
        return [found.device_of(rank) for rank in found.ranks]

    assert devices() == ["auto", "auto"]
    assert devices(devices={1: "cuda:1"}) == devices(devices={"1": "cuda:1"}) == ["auto", "cuda:1"]
    assert devices(model_kwargs={"device": "cpu"}) == ["cpu", "cpu"]
    assert devices(model_kwargs={"device": "cpu"}, devices={0: "auto"}) == ["auto", "cpu"]


def test_what_processes_do_among_themselves_is_in_no_digest(tmp_path: Path) -> None:
    raw = SPEAKING | {"checkpoint": str(tiny_checkpoint())}

    def digest(**changed: Any) -> str:
        return checks.check(raw | changed, source="x.yaml", folder=tmp_path, name="x").digest

    assert digest() == digest(devices={0: "cpu"}, data_plane={"transports": ["tcp"], "address": "::1"})
    assert digest() != digest(max_seq_len=65)
