"""What all peers load: a checkpoint as the hub has them, whose tokens can be counted in a text."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.peers.checkpoint import QWEN3_0_6B, GptOssShape, Shape, prompts, words, write
from models.transformers_lm.loader import load_decoder

SMALL = Shape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocabulary=1000, positions=256
)
WITH_EXPERTS = replace(SMALL, experts=6, chosen=2)
GPT_OSS = GptOssShape(**{**asdict(WITH_EXPERTS), "name": "gpt-oss"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cache") / "small", SMALL)


def test_transformers_loads_it_whole(folder: Path) -> None:
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)

    assert not any(told.values()), told
    assert sum(weights.numel() for weights in model.parameters()) * 2 == SMALL.bytes_per_step


def test_transformers_loads_that_of_gpt_oss_whole(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "it", GPT_OSS)
    node = load_decoder(checkpoint, "llm", dtype="bfloat16")

    parameters = dict(node.model.named_parameters())
    merged = {name: one for name, one in parameters.items() if name.endswith(("gate_up_proj", "down_proj"))}
    assert all(0.015 < one.float().std() < 0.03 for one in merged.values())
    # A weight in MXFP4 takes four bits and a byte for each 32; two of six experts are read.
    of_experts = sum(one.numel() * 17 // 32 for one in merged.values())
    of_experts += sum(2 * one.numel() for name, one in parameters.items() if name.endswith("proj_bias"))
    rest = sum(2 * one.numel() for name, one in parameters.items() if ".experts." not in name)
    assert rest + of_experts * 2 // 6 == GPT_OSS.bytes_per_step


def test_transformers_loads_that_with_experts_whole(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "it", WITH_EXPERTS)
    model, told = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )

    assert not any(told.values()), told
    unread = sum(p.numel() * 4 // 6 for name, p in model.named_parameters() if "experts" in name)
    assert sum(p.numel() for p in model.parameters()) - unread == WITH_EXPERTS.bytes_per_step // 2


@pytest.mark.slow
def test_a_greedy_answer_is_of_tokens_that_are_one_space_each(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    asked = torch.tensor(prompts(SMALL, 4, 16, seed="any"))
    answers = model.generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=24
    )[:, 16:]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert answers.shape == (4, 24)  # nothing ended early
    said = words(folder)
    for answer in answers.tolist():
        text = tokenizer.decode(answer, skip_special_tokens=False)
        assert text == "".join(said[token] for token in answer)
        assert text.count(" ") == 24


def test_it_is_written_once(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns

    assert write(folder, SMALL) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_one_of_another_shape_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "it", SMALL)
    size = (tmp_path / "it" / "model.safetensors").stat().st_size
    other = Shape(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocabulary=1000)
    write(tmp_path / "it", other)

    assert (tmp_path / "it" / "model.safetensors").stat().st_size < size
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_prompts_are_the_same_for_a_seed_and_of_tokens_that_are_text() -> None:
    assert prompts(SMALL, 2, 8, seed="a") == prompts(SMALL, 2, 8, seed="a")
    assert prompts(SMALL, 2, 8, seed="a") != prompts(SMALL, 2, 8, seed="b")
    assert all(256 <= token < 997 for ids in prompts(SMALL, 8, 64, seed="a") for token in ids)


def test_a_step_of_the_usual_shape_reads_946_megabytes() -> None:
    assert round(QWEN3_0_6B.bytes_per_step / 1e6, 1) == 946.5


def test_every_token_has_its_word(folder: Path) -> None:
    said = words(folder)

    assert len(said) == SMALL.vocabulary
    assert said[256:259] == [" a", " b", " c"]
    assert said[-1] == "<|im_end|>"
