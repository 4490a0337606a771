"""`dalsegno check`: its reports on configurations, without starting them."""

import json
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from configs import checks, files
from configs.deployment import DeploymentConfig, NodeGroup
from dalsegno.check.command import examine
from dalsegno.cli import main
from dalsegno.terminal.sequence_diagram import WIDTH
from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.decoder_lm import nodes
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.sharding import SilentPeers
from tests.models.diffusion_pipelines import folders as pipelines
from tests.tiny import tiny_checkpoint
from tests.tiny.bagel import bagel_checkpoint
from tests.tiny.csm import tiny_csm
from tests.tiny.dia import tiny_dia
from tests.tiny.higgs_audio import tiny_higgs_audio
from tests.tiny.omni import tiny_omni
from tests.tiny.pi import tiny_pi05
from tests.tiny.qwen2_5_omni import tiny_qwen2_5_omni
from tests.tiny.qwen3_tts import tiny_qwen3_tts
from workers.data_plane.transports import nixl

GROUPS = {
    "orpheus": [{"node_names": ["LLM"], "ranks": [0]}, {"node_names": ["snac_decoder"], "ranks": [0]}],
    "colocated": [
        {
            "node_names": ["LLM"],
            "ranks": [0],
            "graph_walks": ["prefill", "decode", "decode_llm", "audio_gen"],
        },
        {"node_names": ["snac_decoder"], "ranks": [0], "graph_walks": ["audio_gen", "snac_chunk"]},
    ],
    "pd": [
        {"node_names": ["LLM"], "ranks": [0], "graph_walks": ["prefill"]},
        {"node_names": ["LLM"], "ranks": [1], "graph_walks": ["decode"]},
        {"node_names": ["snac_decoder"], "ranks": [1], "graph_walks": ["snac_chunk"]},
    ],
    "tp2": [
        {"node_names": ["LLM"], "ranks": [0, 1], "tp_size": 2, "graph_walks": ["prefill", "decode"]},
        {"node_names": ["snac_decoder"], "ranks": [0], "graph_walks": ["snac_chunk"]},
    ],
}
"""The placements that are published for Orpheus: model, max_seq_len and node_groups are all they say."""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder as far as it is looked at."""
    folder = tmp_path / "weights"
    folder.mkdir()
    shape = {"num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    said = shape | named | {"hidden_size": 3072, "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def written(folder: Path, groups: str, **changed: Any) -> str:
    path = folder / f"{groups}.yaml"
    path.write_text(
        yaml.safe_dump({"model": "orpheus", "max_seq_len": 131072, "node_groups": GROUPS[groups]} | changed)
    )
    return str(path)


def check(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["check", *args], env=env)


def said(*args: str) -> Any:
    result = check(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.processes
@pytest.mark.parametrize("groups", ["orpheus", "colocated", "pd", "tp2"])
def test_what_is_published_for_a_family_that_is_served_loads_unchanged(
    tmp_path: Path, weights: Path, groups: str
) -> None:
    found = said(written(tmp_path, groups), "--checkpoint", str(weights))

    assert {one["node"] for one in found["nodes"]} == {"prepare", "LLM", "snac_decoder"}
    assert [one["rank"] for one in found["ranks"]] == ([0, 1] if groups in {"pd", "tp2"} else [0])


@pytest.mark.processes
def test_what_is_published_for_bagel_loads_unchanged(tmp_path: Path) -> None:
    """Its guidance on three ranks, as M* writes it; keys and values are not moved to main memory here."""
    groups = [
        {"node_names": ["vit_encoder"], "ranks": [0]},
        {"node_names": ["vae_encoder", "vae_decoder"], "ranks": [0]},
        {"node_names": ["LLM", "combine_cfg"], "ranks": [0]},
        {"node_names": ["LLM_cfg_text"], "ranks": [1], "graph_walks": ["image_gen_cfg"]},
        {"node_names": ["LLM_cfg_img"], "ranks": [2], "graph_walks": ["image_gen_cfg"]},
    ]
    path = tmp_path / "bagel_cfg_parallel.yaml"
    settings = {
        "model": "bagel",
        "max_seq_len": 32768,
        "max_concurrent_requests": 16,
        "kv_cache": {"cpu_offload_pages": 2048},
        "node_groups": groups,
    }
    path.write_text(yaml.safe_dump(settings))

    result = check(str(path), "--checkpoint", str(bagel_checkpoint()))

    assert result.exit_code == 0, result.output
    assert "LLM_cfg_img   kv         image_gen_cfg" in result.stdout
    assert "takes 8296 tokens of the KV cache, " in " ".join(result.stdout.split()), (
        "2 contexts of 100 + 4098"
    )
    path.write_text(yaml.safe_dump(settings | {"kv_cache": {"pages": 1}}))
    assert "unknown key kv_cache" in check(str(path), "--checkpoint", str(bagel_checkpoint())).output


@pytest.mark.processes
def test_what_is_published_for_pipelines_loads_unchanged(tmp_path: Path) -> None:
    """Nodes whose work others do here, and a pool that there is none of, are left out."""
    wan = {"model": "wan22", "max_seq_len": 512, "node_groups": [
        {"node_names": ["text_encoder"], "ranks": [0]},
        {"node_names": ["vae_encoder", "vae_decoder"], "ranks": [0]},
        {"node_names": ["dit"], "ranks": [0]},
    ]}  # fmt: skip
    cosmos = {"model": "cosmos3", "max_seq_len": 8192, "kv_cache": {"max_num_pages": 1024},
        "model_kwargs": {"cuda_graph": True, "graph_max_latent_area": 2000}, "node_groups": [
        {"node_names": ["dit"], "ranks": [0]},
        {"node_names": ["vae_encoder", "vae_decoder", "audio_decoder"], "ranks": [0]},
    ]}  # fmt: skip
    for settings, kind in ((wan, "WanPipeline"), (cosmos, "Cosmos3OmniPipeline")):
        path = tmp_path / f"{settings['model']}.yaml"
        path.write_text(yaml.safe_dump(settings))
        found = said(str(path), "--checkpoint", str(pipelines.written(tmp_path / kind, kind)))
        assert found["output_modalities"] == ["image", "video"]
        assert any("the usual video" in note for note in found["notes"])


@pytest.mark.processes
def test_ranks_that_share_a_copy_are_told(tmp_path: Path, weights: Path) -> None:
    result = check(written(tmp_path, "tp2"), "--checkpoint", str(weights))

    assert result.exit_code == 0, result.output
    assert "LLM           kv         prefill, decode  0+1" in result.stdout
    assert "snac_decoder  stateless  snac_chunk       0 " in result.stdout
    assert "┌─ ranks 0+1 ─" in result.stdout
    assert "LLM (prefill, decode) is shared by ranks 0 and 1 (rank 0 leads)" in result.stdout


@pytest.mark.processes
def test_it_is_drawn(tmp_path: Path, weights: Path) -> None:
    flags = ("--set", "model_kwargs.device=cpu", "--checkpoint", str(weights))
    shown = check(written(tmp_path, "pd"), *flags).stdout

    assert all(len(line) <= WIDTH for line in shown.splitlines() if not line.startswith("checkpoint "))
    assert "\n".join(shown.splitlines()[3:]) == (
        "node          engine     walks       ranks  device\n"
        "prepare       cpu        prepare     0      cpu\n"
        "LLM           kv         prefill     0      cpu\n"
        "LLM           kv         decode      1      cpu\n"
        "snac_decoder  stateless  snac_chunk  1      cpu\n"
        "\n"
        "┌─ rank 0 ───────────────────────────┐   ┌─ rank 1 ───────────────────────────┐\n"
        "│ cpu                                │   │ cpu                                │\n"
        "│ prepare  prepare                   │   │ LLM           decode               │\n"
        "│ LLM      prefill                   │   │ snac_decoder  snac_chunk ► audio   │\n"
        "└─────────────────┬──────────────────┘   └─────────────────┬──────────────────┘\n"
        "                  ├───────────────── token ───────────────►│\n"
        "                  ├═══════════════ KV of LLM ═════════════►│\n"
        "\n"
        "─ tensors   ═ keys and values\n"
        "\n"
        "stream: token, from LLM (decode) to snac_decoder (snac_chunk), windows of 28,\n"
        "        every 7\n"
        "note: ranks 0, 1 share cpu, its cores and memory too\n"
        "warning: keys and values of LLM move from rank 0 to rank 1 between prefill and\n"
        "         decode, 112 KiB for each token so far\n"
        "ok: the placement is right; tokenizer and weights are looked at when it starts"
    )


@pytest.mark.slow
def test_a_model_on_one_rank_has_nothing_to_warn_of() -> None:
    found = said("demo", "--set", "model_kwargs.device=cpu")

    assert (found["notes"], found["warnings"]) == ([], [])
    assert found["ranks"] == [{"rank": 0, "device": "cpu", "nodes": ["prepare", "llm"]}]
    assert check("demo").stdout.splitlines()[-1] == (
        "ok: the placement is right; weights are looked at when it starts"
    )


@pytest.mark.processes
def test_replicas_and_devices_are_told(tmp_path: Path, weights: Path) -> None:
    groups = [{"node_names": ["LLM"], "ranks": [1, 2]}, {"node_names": ["snac_decoder"], "ranks": [0]}]
    path = written(tmp_path, "orpheus", node_groups=groups, devices={0: "cpu", 1: "cpu", 2: "cuda:99"})

    found = said(path, "--checkpoint", str(weights))

    assert found["notes"] == [
        "ranks 0, 1 share cpu, its cores and memory too",
        "LLM (prefill, decode) has 2 replicas: each request gets one of ranks 1, 2",
    ]
    [warning] = found["warnings"]
    assert warning.startswith("devices.2 is 'cuda:99', but this machine has ")
    assert warning.endswith("GPUs: rank 2 does not start here")
    assert "right, though not for this machine;" in check(path, "--checkpoint", str(weights)).stdout


@pytest.mark.processes
@pytest.mark.parametrize("named", ["triton", "flashinfer"])
def test_who_attends_on_gpus_alone_is_told_where_there_is_a_cpu(
    tmp_path: Path, weights: Path, named: str
) -> None:
    told = ("--checkpoint", str(weights), "--set", f"model_kwargs.attention={named}")
    on_cpus = ("--set", "model_kwargs.device=cpu")
    of_two = f"model_kwargs.attention is '{named}', which is for GPUs: ranks 0, 1 do not start on a CPU"

    assert of_two in said(written(tmp_path, "tp2"), *told, *on_cpus)["warnings"]
    assert said(written(tmp_path, "colocated"), *told, *on_cpus)["warnings"] == [
        f"model_kwargs.attention is '{named}', which is for GPUs: rank 0 does not start on a CPU"
    ]
    on_gpus = written(tmp_path, "pd", devices={0: "cuda:98", 1: "cuda:99"})
    assert "attention" not in str(said(on_gpus, *told)["warnings"])


@pytest.mark.processes
@pytest.mark.parametrize("address", ["nowhere.invalid", "203.0.113.1", "a..b"])
def test_an_address_that_a_worker_could_not_listen_at_is_told(
    tmp_path: Path, weights: Path, address: str
) -> None:
    told = ("--checkpoint", str(weights), "--set", f"data_plane.address={address}")

    [warning] = said(written(tmp_path, "pd"), *told)["warnings"][:1]

    assert warning.startswith(f"data_plane.address '{address}' is not an address of this machine (")
    assert warning.endswith("): ranks 0, 1 do not start here")
    assert said(written(tmp_path, "orpheus"), *told)["warnings"] == []  # one rank listens nowhere


@pytest.mark.processes
@pytest.mark.parametrize("is_there", [True, False])
def test_nixl_that_is_not_installed_is_told(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("json",) if is_there else ("no_such_package",))
    told = ("--checkpoint", str(weights), "--set", "data_plane.transports=nixl,tcp")

    warnings = said(written(tmp_path, "pd"), *told)["warnings"]

    assert any("NIXL is not installed" in warning for warning in warnings) is not is_there


def test_a_tokenizer_that_is_not_the_familys_is_refused(tmp_path: Path) -> None:
    result = check(written(tmp_path, "orpheus", max_seq_len=64), "--checkpoint", str(tiny_checkpoint()))

    assert result.exit_code == 78
    assert "tokenizer.json is not Orpheus': expected <custom_token_0> as token 128256" in result.stderr


@pytest.mark.slow
def test_a_checkpoint_that_was_downloaded_is_found(tmp_path: Path, weights: Path) -> None:
    folder = tmp_path / "hub" / "models--canopylabs--orpheus-3b-0.1-ft"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "c0ffee").symlink_to(weights, target_is_directory=True)
    path = written(tmp_path, "orpheus")

    result = check(path, "--json", env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    without = check(path, env={"HF_HUB_CACHE": str(tmp_path)})

    assert json.loads(result.stdout)["checkpoint"] == str(weights)
    assert without.exit_code == 78
    assert "get it with `hf download canopylabs/orpheus-3b-0.1-ft`" in without.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("max_seq_len=131073",),
            "--set: max_seq_len is 131073, but the model in {weights} was made for 131072 tokens; set",
        ),
        (("model_kwargs.snac=nowhere",), "--set: model_kwargs.snac: {here}/nowhere does not exist"),
        (("model_kwargs.snack=1",), "model_kwargs: unknown key snack; did you mean 'snac'?"),
        (
            ("model=nonesuch",),
            "model 'nonesuch' is unknown: expected one of ['bagel', 'block_diffusion', 'cohere_asr', ",
        ),
    ],
)
def test_what_a_worker_would_refuse_is_refused_here(
    tmp_path: Path, weights: Path, flags: tuple[str, ...], message: str
) -> None:
    told = [part for flag in flags for part in ("--set", flag)]
    path, text = written(tmp_path, "pd"), message.format(weights=weights, here=Path.cwd())

    result = check(path, "--checkpoint", str(weights), *told)
    as_json = check(path, "--checkpoint", str(weights), *told, "--json")

    assert (result.exit_code, as_json.exit_code) == (78, 78)
    assert text in result.stderr
    answer = json.loads(as_json.stdout)
    assert answer["ok"] is False
    assert text in answer["error"]


def shared_by(ranks: int, checkpoint: Path) -> DeploymentConfig:
    groups = [NodeGroup(node_names=["prepare", "llm"], ranks=list(range(ranks)), tp_size=ranks)]
    return msgspec.structs.replace(checks.resolve(str(checkpoint)), node_groups=groups)


@pytest.mark.processes
def test_a_model_that_so_many_ranks_cannot_share_is_refused_in_the_workers_words(tmp_path: Path) -> None:
    folder = tiny_checkpoint()
    with pytest.raises(UnsupportedArchitectureError) as refused:
        load_decoder(folder, "llm", peers=SilentPeers(0, 3))
    groups = [{"node_names": ["prepare", "llm"], "ranks": [0, 1, 2], "tp_size": 3}]
    path = tmp_path / "three.yaml"
    path.write_text(yaml.safe_dump({"model": "decoder_lm", "max_seq_len": 64, "node_groups": groups}))

    result = check(str(path), "--checkpoint", str(folder))

    assert result.exit_code == 78
    assert result.stderr == f"Error: {refused.value.message}\n"
    assert examine(shared_by(2, folder)).model_fits  # two can


@pytest.mark.parametrize(
    "changed",
    [
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        {"architectures": ["NoSuchForCausalLM"]},
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
        {"rope_scaling": {"rope_type": "no such"}},
    ],
    ids=["states", "nobody knows it", "three bits", "angles"],
)
def test_a_model_that_a_worker_would_refuse_is_refused_in_its_words(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = tmp_path / "changed"
    copytree(tiny_checkpoint(), folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changed))
    with pytest.raises(CheckpointError) as refused:
        load_decoder(folder, "llm")

    result = check(str(folder))

    assert result.exit_code == 78
    assert result.stderr == f"Error: {refused.value.message}\n"


def test_where_no_torch_is_the_model_is_left_to_the_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: Path
) -> None:
    monkeypatch.delattr("workers.loading.node_loading", raising=False)
    monkeypatch.setitem(sys.modules, "workers.loading.node_loading", None)

    result = check(written(tmp_path, "orpheus"), "--checkpoint", str(weights))

    assert result.exit_code == 0, result.output
    assert " ".join(result.stdout.split()).endswith(
        "ok: the placement is right; model, tokenizer and weights are looked at when it starts"
    )


def test_a_model_whose_family_does_not_look_at_it_is_left_to_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(nodes, "examine")

    result = check("demo")

    assert result.exit_code == 0, result.output
    assert " ".join(result.stdout.split()).endswith(
        "ok: the placement is right; model and weights are looked at when it starts"
    )


@pytest.mark.processes
def test_every_named_configuration_is_right(tmp_path: Path, weights: Path) -> None:
    """`demo` has its own weights; the others are checked as if theirs were downloaded."""
    assert len(files.named()) > 1
    of_family = {
        "bagel": bagel_checkpoint(),
        "csm": tiny_csm(),
        "dia": tiny_dia(),
        "higgs_audio_v2": tiny_higgs_audio(),
        "qwen3_omni": tiny_omni(),
        "qwen2_5_omni": tiny_qwen2_5_omni(),
        "qwen3_tts": tiny_qwen3_tts(),
        "pi05": tiny_pi05(),
        "image_pipeline": pipelines.written(tmp_path / "image", "ZImagePipeline"),
        "wan22": pipelines.written(tmp_path / "wan22", "WanPipeline"),
        "cosmos3": pipelines.written(tmp_path / "cosmos3", "Cosmos3OmniPipeline"),
    }
    for name in files.named():
        raw = yaml.safe_load((files.configs_folder() / f"{name}.yaml").read_text())
        folder = of_family.get(raw["model"], weights)
        flags: tuple[str, ...] = () if "checkpoint" in raw else ("--checkpoint", str(folder))
        if raw["model"] in (
            "csm",
            "dia",
            "higgs_audio_v2",
            "qwen3_omni",
            "qwen2_5_omni",
            "qwen3_tts",
        ):  # the tiny ones have fewer positions than the published
            flags += ("--set", "max_seq_len=512")
        assert check(name, *flags).exit_code == 0, name


def test_a_folder_is_checked_too() -> None:
    assert check(str(tiny_checkpoint())).exit_code == 0


@pytest.mark.processes
@pytest.mark.parametrize(("kv_tokens", "is_refused"), [(8296, False), (8000, True)])
def test_the_room_of_a_request_is_estimated(tmp_path: Path, kv_tokens: int, is_refused: bool) -> None:
    nodes = ["vit_encoder", "vae_encoder", "LLM", "vae_decoder"]
    path = tmp_path / "drawing.yaml"
    settings = {"model": "bagel", "kv_tokens": kv_tokens, "max_seq_len": 4200}
    path.write_text(yaml.safe_dump(settings | {"node_groups": [{"node_names": nodes, "ranks": [0]}]}))

    notes = said(str(path), "--checkpoint", str(bagel_checkpoint()))["notes"]

    [image] = [note for note in notes if note.startswith("an image of 1024 x 1024 pixels")]
    assert "takes 8296 tokens of the KV cache, " in image
    assert ("more than kv_tokens 8000" in image) is is_refused
