"""The results of our GPU kernels in Triton's interpreter: attention, layers, and recorded steps."""

from typing import Any

import pytest
import torch

from tests.workers.kv_engine import interpreted
from tests.workers.kv_engine.interpreted import CASES, DECODERS

pytest.importorskip("triton", reason="Triton is made for Linux only")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]  # the first test computes for all


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Run one process for all tests: its start takes longer than its computations."""
    return interpreted.found()


@pytest.mark.parametrize("name", CASES)
def test_every_token_gets_what_the_definition_of_attention_says(found: dict[str, Any], name: str) -> None:
    rounding = 2e-5 if CASES[name].dtype is torch.float32 else 5e-3
    assert found["errors"][name] < rounding  # not a number is not less


@pytest.mark.parametrize("name", DECODERS)
def test_logits_by_the_kernels_are_those_of_transformers_modules(found: dict[str, Any], name: str) -> None:
    assert found["decoders"][name] < 5e-5  # standard deviations


def test_a_decode_of_a_row_takes_six_launches_per_layer_and_of_more_rows_nine(found: dict[str, Any]) -> None:
    """So Qwen3-8B with its 36 layers takes fewer than 260 for one row."""
    replays = found["replays"]
    layers = replays["layers"]
    beside = replays["one_row"] - 6 * layers

    assert replays["two_rows"] - 9 * layers == beside
    assert 36 * 6 + beside < 260


def test_two_ranks_replay_their_parts_of_fused_layers(found: dict[str, Any]) -> None:
    """Prompts and decodes; the answers are those of transformers' `generate`."""
    shared = found["shared_decoder"]
    assert shared["found"] == shared["expected"]
    assert shared["kernels"] == ["triton", "triton"]
    assert shared["replays"] == shared["forwards"] > 8


def test_decodes_are_measured_by_stages(found: dict[str, Any]) -> None:
    """That it runs; what it measures has no meaning in an interpreter."""
    assert len(found["decode_times"]) == 2
    assert min(found["decode_times"]) > 0


def test_products_of_one_row_are_exact_to_rounding(found: dict[str, Any]) -> None:
    assert len(found["products"]) == 12
    assert max(found["products"].values()) < 1e-6


def test_products_of_few_bits_are_exact_to_rounding(found: dict[str, Any]) -> None:
    """Of one row, of some and of many, in all forms; the bits of numbers are read as those of floats."""
    assert len(found["few_bits"]) == 12 * 2 * 7
    assert max(found["few_bits"].values()) < 3e-5


def test_matrices_of_several_kinds_are_multiplied_as_one(found: dict[str, Any]) -> None:
    assert len(found["stacked_few_bits"]) == 4
    assert max(found["stacked_few_bits"].values()) < 1e-5


FEW_BITS = ("AWQ as stored", "GPTQ as stored", "NF4 as stored", "FP8 as stored", "int4", "int8 with biases")


@pytest.mark.parametrize("name", [*FEW_BITS, "fp8", "int4 of AWQ"])
def test_weights_of_few_bits_are_computed_without_being_in_memory_as_floats(
    found: dict[str, Any], name: str
) -> None:
    """Logits are those of transformers' layers with the same weights; published ones are not rounded."""
    case = found["few_bits_decoders"][name]

    has_head = not ("stored" in name or "AWQ" in name)
    assert case["left"] == (15 if has_head else 14)  # two layers, and a head of floats
    assert case["in memory"] == 512 * 64  # the embeddings
    assert case["own"] < 1e-3  # standard deviations
    assert (case["floats"] < 1e-3) == name.endswith("as stored")


def test_a_replayed_step_launches_what_was_recorded_over_the_same_memory(found: dict[str, Any]) -> None:
    """Whatever the order of arrival and the length of the sequences."""
    replays = found["replays"]

    assert replays["modules"] == replays["kernels"] == replays["expected"]
    assert replays["replays"] > 20
    # Alone, and beside decodes; padded to 16 and to 32 tokens, or filling them.
    assert {size for size, _ in replays["prompts"]} == {16, 32}
    assert len(replays["prompts"]) > 3


def test_the_kernel_samples_the_tokens_that_torch_samples(found: dict[str, Any]) -> None:
    """With any filter, in a list or in the whole row, with equal, infinite and invalid logits."""
    samplers = found["samplers"]

    assert samplers["alike"] == samplers["rows"] == 80
    assert samplers["different"] > 50


def test_the_checks_at_the_start_find_a_kernel_that_is_wrong(found: dict[str, Any]) -> None:
    said = found["device_checks"]

    assert said["right"] == ""
    assert "attention is wrong on cpu" in said["attention"]
    assert "products is wrong on cpu" in said["products"]
    assert "sampler gives" in said["sampler"]
    assert said["few bits"] == ""
    assert "few bits differ by 0.0" in said["wrong few bits"]
    assert "140 x 96 weights of 4 bits and 6 bits" in said["wrong few bits"]
