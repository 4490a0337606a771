"""The file for llama.cpp has the weights of the checkpoint."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.peers.checkpoint import Gemma3Shape, GptOssShape, Shape, words, write
from benchmarks.peers.forms import path_of
from benchmarks.peers.to_gguf import convert
from models.gguf import conversion
from models.transformers_lm.expert_layers import ExpertMatrix, Part, bias_of
from models.transformers_lm.loader import load_decoder

PARTS: tuple[Part, ...] = ("gate", "up", "down")


SIZES: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 1000}


@pytest.mark.parametrize(
    "shape",
    [
        Shape(name="any", layers=2, intermediate=96, **SIZES),
        Shape(name="any", layers=2, intermediate=96, experts=6, chosen=2, **SIZES),
        GptOssShape(name="any", layers=2, intermediate=96, experts=6, chosen=2, **SIZES),
        Gemma3Shape(name="any", layers=6, intermediate=96, norm=0.0, **SIZES),
    ],
    ids=["qwen3", "qwen3_moe", "gpt_oss", "gemma3"],
)
def test_the_file_is_the_model_when_we_read_it(tmp_path: Path, shape: Shape) -> None:
    checkpoint = write(tmp_path / "it", shape)
    convert(checkpoint)
    conversion.convert(path_of(checkpoint), tmp_path / "again")

    text = torch.arange(300, 340)
    found, expected = (
        load_decoder(folder, "llm", dtype="float32").reference(text)
        for folder in (tmp_path / "again", checkpoint)
    )
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.std()))
    told = AutoTokenizer.from_pretrained(tmp_path / "again").decode(text)
    assert told == "".join(words(checkpoint)[token] for token in text)


def test_experts_of_gpt_oss_are_the_same_numbers(tmp_path: Path) -> None:
    shape = GptOssShape(name="any", layers=2, intermediate=96, experts=6, chosen=2, **SIZES)
    checkpoint = write(tmp_path / "it", shape)
    convert(checkpoint)

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path_of(checkpoint)).tensors}
    node = load_decoder(checkpoint, "llm", dtype="float32")
    for number, layer in enumerate(node.model.model.layers):
        for part in PARTS:
            stored = tensors[f"blk.{number}.ffn_{part}_exps.weight"]
            assert stored.tensor_type is gguf.GGMLQuantizationType.MXFP4
            found = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
            matrices = [ExpertMatrix(layer.mlp.experts, expert, part).weight for expert in range(6)]
            assert torch.equal(found, torch.stack(matrices))
            bias = torch.from_numpy(tensors[f"blk.{number}.ffn_{part}_exps.bias"].data.copy())
            assert torch.equal(bias, bias_of(layer.mlp.experts, part))
        sinks = torch.from_numpy(tensors[f"blk.{number}.attn_sinks.weight"].data.copy())
        assert torch.equal(sinks, layer.self_attn.sinks)
