"""The fused GPU layers, in Triton's interpreter, against transformers' modules."""

import logging

import pytest
import torch

from models.decoder_lm.nodes import load
from tests.tiny import Family, tiny_checkpoint

gpu_decoder = pytest.importorskip("workers.kv_engine.gpu.decoder", reason="Triton is made for Linux only")


@pytest.mark.parametrize(
    ("family", "reason"), [("gemma2", "Gemma2ForCausalLM"), ("phi3", "Phi3ForCausalLM"), ("qwen3_moe", "Moe")]
)
def test_what_the_kernels_do_not_know_is_left_to_torch_and_the_log_says_why(
    family: Family, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = load(tiny_checkpoint(family))

    with caplog.at_level(logging.INFO):
        assert gpu_decoder.fuse(node) is node

    assert "llm is computed by torch: the GPU kernels do not support" in caplog.text
    assert reason in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "windows"),
    [("mistral", [24, 24]), ("qwen2_window", [None, 24]), ("qwen3", [None, None]), ("llama", [None, None])],
)
def test_each_layer_looks_as_far_back_as_transformers_has_it(
    family: Family, windows: list[int | None]
) -> None:
    decoder = gpu_decoder.fuse(load(tiny_checkpoint(family)))

    assert [layer.window for layer in decoder._layers] == windows


def test_a_llama_with_a_window_in_its_file_has_none_as_with_transformers() -> None:
    node = load(tiny_checkpoint("llama"))
    node.model.config.sliding_window = 24

    decoder = gpu_decoder.fuse(node)

    assert [layer.window for layer in decoder._layers] == [None, None]


def test_no_weight_is_there_twice() -> None:
    node = load(tiny_checkpoint("llama"))
    ids = torch.arange(9)
    before = node.reference(ids)

    fused = gpu_decoder.fuse(node)

    parameters = list(node.model.parameters())
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in parameters
    }
    assert sum(storage.nbytes() for storage in storages.values()) == sum(p.nbytes for p in parameters)
    assert fused.parameters == node.parameters
    assert (fused.kernels, node.kernels) == ("triton", "torch")
    assert torch.equal(fused.reference(ids), before)
