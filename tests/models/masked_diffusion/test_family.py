"""Folders of masked diffusion models: claimed, read under their published names, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from models.checkpoints.claims import CheckpointInfo, Claim
from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.masked_diffusion.graph import DEFAULT_MAX_TOKENS, GRAPH, claims
from models.masked_diffusion.nodes import examine, load
from models.masked_diffusion.processing import load as load_processing
from models.masked_diffusion.weight_files import weight_files
from models.registry import family_of
from models.sequence_request import PreparedPrompt, SamplingParams
from shared.errors import ClientError
from shared.events import Inputs, Limits, Params, WalkResult
from shared.plans import PlanRequest, StepResult
from shared.tensors import inline_ids
from tests.models.masked_diffusion import naive
from tests.tiny.masked_diffusion import LLADA, MASK_ID, tiny_dream, tiny_llada, tiny_mdlm

LIMITS: Final[dict[str, Any]] = {"max_seq_len": 512, "kv_tokens": 4096, "default_max_tokens": 2048}


def copied(folder: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(folder, to)
    raw = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(raw | config))
    return to


# ---- claims --------------------------------------------------------------------------------------
@pytest.mark.parametrize("folder", [tiny_llada, tiny_dream, tiny_mdlm])
def test_its_folders_are_detected(folder: Any) -> None:
    assert family_of(folder()) == "masked_diffusion"


def test_a_plain_qwen_is_not_claimed(tmp_path: Path) -> None:
    folder = copied(tiny_mdlm(), tmp_path / "qwen", architectures=["Qwen3ForCausalLM"], model_type="qwen3")

    assert claims(CheckpointInfo.read(folder)) is None
    assert claims(CheckpointInfo.read(tiny_mdlm())) is Claim.ARCHITECTURE


# ---- weights -------------------------------------------------------------------------------------
def llada_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """LLaDA's layers, restated over the published names: every token sees all others."""
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    heads, kv_heads, dim = LLADA["n_heads"], LLADA["n_kv_heads"], LLADA["d_model"] // LLADA["n_heads"]

    def of(name: str) -> torch.Tensor:
        return weights[f"model.transformer.{name}.weight"].double()

    def norm(states: torch.Tensor, name: str) -> torch.Tensor:
        return states * (states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * of(name)

    rates = 1.0 / 500000.0 ** (torch.arange(0, dim, 2).double() / dim)
    angles = torch.outer(torch.arange(len(ids)).double(), rates).repeat(1, 2)

    def turned(states: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, -1)
        return states * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    states = of("wte")[torch.tensor(ids)]
    for layer in range(LLADA["n_layers"]):
        at = f"blocks.{layer}"
        seen = norm(states, f"{at}.attn_norm")
        queries, keys, values = (
            (seen @ of(f"{at}.{part}_proj").T).reshape(len(ids), count, dim).transpose(0, 1)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        keys, values = (part.repeat_interleave(heads // kv_heads, 0) for part in (turned(keys), values))
        scores = (turned(queries) @ keys.transpose(1, 2) / dim**0.5).softmax(-1)
        states = states + (scores @ values).transpose(0, 1).reshape(len(ids), -1) @ of(f"{at}.attn_out").T
        seen = norm(states, f"{at}.ff_norm")
        gated = torch.nn.functional.silu(seen @ of(f"{at}.ff_proj").T) * (seen @ of(f"{at}.up_proj").T)
        states = states + gated @ of(f"{at}.ff_out").T
    return norm(states, "ln_f") @ of("ff_out").T


def test_lladas_layers_are_llamas_under_other_names() -> None:
    ids = [5, 17, 300, 42, MASK_ID, MASK_ID]
    wanted = llada_logits(tiny_llada(), ids)

    found = naive.forward_of(load(tiny_llada(), dtype="float32").model, 0)(torch.tensor(ids))

    torch.testing.assert_close(found[:, 1:], wanted[:, 1:], atol=2e-3, rtol=1e-3)
    assert float(wanted.std()) > 0.5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"alibi": True}, "alibi True is not served"),
        ({"layer_norm_type": "default"}, "layer_norm_type 'default' is not served"),
        ({"include_qkv_bias": True}, "include_qkv_bias True"),
        ({"block_type": "sequential"}, "block_type 'sequential'"),
    ],
)
def test_other_layers_are_refused_by_name(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=problem):
        examine(copied(tiny_llada(), tmp_path / "other", **changes), "llm")


@pytest.mark.parametrize("key", ["activation_type", "block_type", "layer_norm_type", "rope"])
def test_an_absent_key_means_what_llada_assumes(key: str, tmp_path: Path) -> None:
    folder = copied(tiny_llada(), tmp_path / "other")
    raw = json.loads((folder / "config.json").read_text())
    raw.pop(key)
    (folder / "config.json").write_text(json.dumps(raw))

    with pytest.raises(UnsupportedArchitectureError, match=f"LLaDA with {key} "):
        examine(folder, "llm")


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected numbers for d_model, found 'wide'"):
        examine(copied(tiny_llada(), tmp_path / "odd", d_model="wide"), "llm")


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="sliding window"):
        examine(copied(tiny_dream(), tmp_path / "window", use_sliding_window=True), "llm")


def test_a_folder_without_a_mask_is_refused(tmp_path: Path) -> None:
    folder = copied(tiny_dream(), tmp_path / "maskless", mask_token_id=None)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named.pop("mask_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    text = (folder / "tokenizer.json").read_text().replace("<|mask|>", "<|other|>")
    (folder / "tokenizer.json").write_text(text)

    with pytest.raises(CheckpointError, match="names no mask token"):
        examine(folder, "llm")


def test_a_wrong_block_length_of_the_deployment_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model_kwargs.block_length: expected .* found 0"):
        load(tiny_mdlm(), kwargs={"block_length": 0})


def test_the_verifiers_weights_count_as_weights_of_the_node() -> None:
    files = weight_files(tiny_mdlm(), "llm", {"verifier": str(tiny_dream())})

    assert set(files) == {"model.safetensors", "verifier/model.safetensors"}
    assert set(weight_files(tiny_mdlm(), "llm", {})) == {"model.safetensors"}


# ---- requests ------------------------------------------------------------------------------------
def first_walks(params: Params, prompt_tokens: int = 10) -> Any:
    request = PlanRequest(
        request_id="one", inputs=Inputs(text="hello"), params=params, limits=Limits(**LIMITS), seed=3
    )
    plan = GRAPH.plan(request)
    next(plan)
    facts = PreparedPrompt(prompt_tokens=prompt_tokens, sampling=SamplingParams())
    handle = inline_ids("ids", [*range(prompt_tokens)])
    result = WalkResult(
        name="prepare",
        facts={"prompt_tokens": facts.prompt_tokens, "sampling": {}},
        outputs={"token_ids": handle},
    )
    return plan.send(StepResult(walks=(result,)))


def test_a_request_without_a_length_gets_the_familys() -> None:
    prefill = first_walks(Params()).walks[0].args

    assert prefill.max_tokens == DEFAULT_MAX_TOKENS
    assert first_walks(Params(), prompt_tokens=500).walks[0].args.max_tokens == 12
    assert first_walks(Params(max_tokens=300)).walks[0].args.max_tokens == 300


def test_the_options_choose_the_program() -> None:
    plain = first_walks(Params(options={"steps": 4})).walks[0].args
    verified = first_walks(Params(options={"apd": True})).walks[0].args

    assert (plain.token_program, plain.options) == ("canvas", {"steps": 4})
    assert verified.token_program == "apd"


@pytest.mark.parametrize(
    "params",
    [
        Params(presence_penalty=1.0),
        Params(repetition_penalty=1.2),
        Params(bad_words=["no"]),
        Params(min_tokens=3),
    ],
)
def test_what_depends_on_the_order_of_tokens_is_refused(params: Params) -> None:
    request = PlanRequest(
        request_id="one", inputs=Inputs(text="hello"), params=params, limits=Limits(**LIMITS), seed=3
    )
    with pytest.raises(ClientError, match="decides tokens in any order"):
        next(GRAPH.plan(request))


def test_a_turns_end_ends_an_answer() -> None:
    processing = load_processing(tiny_llada(), max_seq_len=512)

    assert len(processing.eos_ids) == len(set(processing.eos_ids)) >= 1
