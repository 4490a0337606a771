"""LLaDA2's layers are computed by transformers' GLM 4.5: its logits are those of a restated forward pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.block_diffusion import llada2
from models.block_diffusion.graph import claims
from models.block_diffusion.nodes import examine, load, recipe_of
from models.checkpoints.claims import CheckpointInfo, Claim
from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from tests.models.block_diffusion.llada2_forward import NaiveLLaDA2
from tests.tiny.block_diffusion import LLADA2, tiny_bd3lm, tiny_llada2

IDS = torch.randint(0, 500, (24,), generator=torch.Generator().manual_seed(2)).tolist()


def in_blocks(block: int) -> torch.Tensor:
    number = torch.arange(len(IDS)) // block
    return number[None] <= number[:, None]


@torch.inference_mode()
def served_logits(visible: torch.Tensor) -> torch.Tensor:
    mask = torch.where(visible, 0.0, -torch.inf)[None, None]
    model = load(tiny_llada2()).model
    logits: torch.Tensor = model(torch.tensor([IDS]), attention_mask=mask, use_cache=False).logits[0]
    return logits


def test_logits_are_those_of_the_published_layers() -> None:
    naive = NaiveLLaDA2(tiny_llada2())
    expected = naive.logits(IDS, in_blocks(8))

    assert (served_logits(in_blocks(8)) - expected).abs().max() < 1e-4
    assert (served_logits(in_blocks(24)) - expected).abs().max() > 1, "another mask shows"

    naive.weights["model.layers.1.mlp.gate.expert_bias"].zero_()
    assert (naive.logits(IDS, in_blocks(8)) - expected).abs().max() > 0.1, "and the bias that chooses experts"


def write(folder: Path, **changes: Any) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).symlink_to(tiny_llada2() / name)
    (folder / "config.json").write_text(json.dumps(LLADA2 | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bias": True}, "a bias after attention"),
        ({"norm_head": True}, "a normalised head"),
        ({"use_sliding_window": True}, "a sliding window"),
        ({"num_shared_experts": 0}, "num_shared_experts"),
        ({"score_function": "softmax"}, "score_function"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_a_feature_that_is_not_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=words):
        examine(write(tmp_path, **changes), "llm")


def test_a_config_without_heads_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        llada2.published({**LLADA2, "num_key_value_heads": None}, tmp_path)


def test_weights_of_other_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 128 rows: expected 96"):
        load(write(tmp_path, num_key_value_heads=1))


def test_the_recipe_follows_from_the_folder(tmp_path: Path) -> None:
    mask = recipe_of(tiny_llada2()).mask_id

    assert (recipe_of(tiny_llada2()).block_length, recipe_of(tiny_llada2()).threshold) == (32, 0.95)
    assert (recipe_of(tiny_bd3lm()).block_length, recipe_of(tiny_bd3lm()).begins_at_prompt) == (8, True)
    assert recipe_of(write(tmp_path, mask_token_id=77)).mask_id == 77 != mask


def test_a_folder_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").unlink()
    text = (tiny_llada2() / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|mask|>", "<|nothing|>"))

    with pytest.raises(CheckpointError, match="names no mask token"):
        recipe_of(tmp_path)


def test_llada2_and_folders_with_bd3lm_in_their_name_are_claimed() -> None:
    assert claims(CheckpointInfo.read(tiny_llada2())) is Claim.ARCHITECTURE
    assert claims(CheckpointInfo.read(tiny_bd3lm())) is Claim.CHECKPOINT
    qwen = {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}
    assert claims(CheckpointInfo(folder=Path("x/Qwen3-diffusion-bd3lm-v0.1"), config=qwen)) is not None
    assert claims(CheckpointInfo(folder=Path("x/Qwen3-diffusion-mdlm-v0.1"), config=qwen)) is None
