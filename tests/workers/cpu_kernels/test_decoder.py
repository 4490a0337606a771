"""A decoder with CPU kernels answers like transformers' `generate`, and no answer depends on the batch."""

import logging
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from benchmarks.peers.checkpoint import GptOssShape, write
from models.checkpoints.files import UnsupportedArchitectureError
from models.grouped_weights import GroupedWeight
from models.transformers_lm.expert_layers import matrix_named
from models.transformers_lm.left_weights import CLASSES
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.node import DecoderLM
from tests.workers.cpu_kernels import models
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run
from workers.cpu_kernels import decoder, layer_packing
from workers.cpu_kernels import library as kernels
from workers.cpu_kernels.decoder import NativeDecoder, use_cpu_kernels
from workers.cpu_kernels.library import Choice
from workers.cpu_kernels.packing import MatrixPacker
from workers.kv_engine import kernel_models
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.node import KVNode
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.quantisation import forms as quantisation_forms
from workers.kv_engine.quantisation.forms import Forms
from workers.kv_engine.quantisation.wanted import Quantisation
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import StepBuilder
from workers.kv_engine.text_logits import Predictions, predictions

NEW_TOKENS = 40
LENGTHS: Final = (3, 30, 61, 100)


def engine(of: KVNode, **sizes: Any) -> KVEngine:
    return make_engine(
        of, **{"num_blocks": 200, "block_size": 8, "max_step_tokens": 64, "max_sequences": 8} | sizes
    )


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(models.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def answers(by: KVEngine, texts: list[list[int]]) -> list[list[int]]:
    specs = [
        SequenceSpec(key=str(number), prompt_ids=text, max_tokens=NEW_TOKENS, ignore_eos=True)
        for number, text in enumerate(texts)
    ]
    found = run(by, specs, every=3)
    return [ids(found[str(number)]) for number in range(len(texts))]


@cache
def generated(name: str) -> list[list[int]]:
    """Transformers' answers to prompts of `LENGTHS`."""
    model = models.node(name).model
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [
        model.generate(torch.tensor([text]), max_new_tokens=NEW_TOKENS, **how)[0, len(text) :].tolist()
        for text in prompts(*LENGTHS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("name", models.MODELS)
def test_answers_are_those_of_generate(name: str, variant: str) -> None:
    """Prompts in chunks of nine tokens, batched with decodes; texts longer than windows and key tiles."""
    by_kernels = NativeDecoder(models.node(name), library(variant), threads=2)

    served = engine(by_kernels, max_step_tokens=9)
    found = answers(served, prompts(*LENGTHS))

    assert served.stats().kernels == variant.removeprefix("emulated_")
    assert found == generated(name)
    assert len({token for answer in found for token in answer}) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_blocks_before_the_window_of_all_layers_are_given_back(name: str) -> None:
    """A text and its answer have 140 tokens, the pool 80."""
    by_kernels = NativeDecoder(models.node(name, sliding_window=24), library(NAMES[-1]), threads=1)
    served = engine(by_kernels, max_step_tokens=9, num_blocks=10)

    [found] = answers(served, prompts(LENGTHS[-1]))

    assert served.stats().cache.unread_blocks == 14
    assert found == answers(engine(models.node(name, sliding_window=24)), prompts(LENGTHS[-1]))[0]


@pytest.mark.parametrize("cells", [torch.float32, torch.int8])
@torch.inference_mode()
def test_keys_before_the_window_are_not_read(cells: torch.dtype) -> None:
    """Their blocks may be another sequence's, whose numbers may be none."""
    wanted = Quantisation(rounds_cells=cells is torch.int8)
    by = NativeDecoder(models.node("mistral"), library(NAMES[-1]), threads=1, quantisation=wanted)
    [text] = prompts(130)
    sequence = Sequence(SequenceSpec(key="a", prompt_ids=text, max_tokens=1))
    sequence.blocks, sequence.row = list(range(17)), 0
    builder = StepBuilder(
        max_sequences=1, max_step_tokens=130, max_blocks=17, block_size=8, device=torch.device("cpu")
    )

    def last_states(*, poisoned: bool) -> torch.Tensor:
        pool = PagedPool.of(by, slots=136)
        for start, count in ((0, 110), (110, 20)):
            step = builder.build([Span(sequence, start, count)])
            with attention_context(pool, step):
                states = by.forward(by.embed(step.token_ids), step)
            if poisoned:  # all blocks before the first key that a later token sees, number 87
                for kept in (*pool.keys, *pool.values):
                    kept[:80] = torch.nan if cells is torch.float32 else -1  # the bits of NaN
        return states

    assert torch.equal(last_states(poisoned=True), last_states(poisoned=False))


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_heads_that_end_within_a_grain_leave_nothing_behind_them(heads: int) -> None:
    """Products in bfloat16 read 32 numbers at a time: those of an earlier step if nobody clears them."""
    changes: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 48}
    by = NativeDecoder(
        models.node("qwen3", dtype=torch.bfloat16, hidden_size=32, **changes), library(NAMES[-1]), threads=1
    )
    texts = prompts(3, 200, 30, 7, 150)
    alone = [answers(engine(by), [text])[0] for text in texts]

    poisoned = torch.full((200, 32), torch.nan)
    pool = PagedPool.of(by, slots=208)
    sequence = Sequence(SequenceSpec(key="a", prompt_ids=texts[1], max_tokens=1))
    sequence.blocks, sequence.row = list(range(26)), 0
    builder = StepBuilder(
        max_sequences=1, max_step_tokens=200, max_blocks=26, block_size=8, device=torch.device("cpu")
    )
    step = builder.build([Span(sequence, 0, 200)])
    with torch.inference_mode(), attention_context(pool, step):
        by.forward(poisoned, step)  # its activations are no numbers

    assert answers(engine(by), texts) == alone


def test_layers_without_positions_alone_are_computed() -> None:
    changes: dict[str, Any] = {"no_rope_layers": [0, 0, 0]}
    by_kernels = NativeDecoder(models.node("smollm3", **changes), library(NAMES[-1]), threads=1)

    found = answers(engine(by_kernels), prompts(20))

    assert found == answers(engine(models.node("smollm3", **changes)), prompts(20))


@pytest.mark.slow
def test_a_text_that_outgrows_short_factors_gets_long_ones() -> None:
    """Prompts are shorter or longer than 64 tokens, and two of the answers pass that."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 20, "long_factor": [3.0] * 20, "factor": 8.0}
    length = {"original_max_position_embeddings": 64}
    rope |= {"rope_theta": 1e4, "partial_rotary_factor": 0.5, **length}
    changes: dict[str, Any] = {"rope_parameters": rope, **length}
    by_kernels = NativeDecoder(models.node("phi3", **changes), library(NAMES[-1]), threads=1)
    assert by_kernels.rotary_change == 64

    found = answers(engine(by_kernels, max_step_tokens=9), prompts(*LENGTHS))

    assert found == answers(engine(models.node("phi3", **changes)), prompts(*LENGTHS))
    assert found != answers(engine(models.node("phi3")), prompts(*LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe", "gemma3", "phi3"])
def test_probabilities_are_the_same_bits_alone_and_among_others_and_however_a_prompt_is_cut(
    name: str, dtype: torch.dtype, variant: str
) -> None:
    specs = [
        SequenceSpec(key=str(number), prompt_ids=text, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
        for number, text in enumerate(prompts(150, 20, 33, 7, 80))
    ]
    three, one = (
        NativeDecoder(models.node(name, dtype=dtype), library(variant), threads=threads) for threads in (3, 1)
    )
    alone = engine(one, max_step_tokens=11, max_sequences=1)

    together = run(engine(three), specs, every=2)

    for spec in specs:
        [(key, found)] = run(alone, [spec]).items()
        assert [output.score for output in found] == [output.score for output in together[key]]


@pytest.mark.slow
@pytest.mark.parametrize("variant", NAMES)
def test_an_expert_may_get_more_rows_than_a_block_has(variant: str) -> None:
    """Half of a long prompt's tokens see each of four experts, in one step."""
    texts = prompts(450, 430)
    sizes = {"max_step_tokens": 900, "num_blocks": 300}

    found = answers(
        engine(NativeDecoder(models.node("mixtral"), library(variant), threads=2), **sizes), texts
    )

    assert found == answers(engine(models.node("mixtral"), **sizes), texts)
    assert len({token for answer in found for token in answer}) > 20


@pytest.mark.parametrize(
    ("dtype", "bits", "seen"),
    [
        (torch.float32, None, 3),
        (torch.bfloat16, None, 11),
        (torch.float32, 8, 11),
    ],
)
def test_where_there_is_rounding_all_experts_are_checked_at_load(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int | None, seen: int
) -> None:
    """Rounding may choose another expert, which changes a logit by more than rounding."""
    node = models.node("qwen3_moe", dtype=dtype)
    by = NativeDecoder(node, library(NAMES[-1]), threads=1, quantisation=Quantisation(bits=bits))
    right, chosen = by.forward, set()

    def forward(inputs: Any, step: Any) -> torch.Tensor:
        chosen.add(by._layers[0].experts.choice.chosen)
        return right(inputs, step)

    monkeypatch.setattr(by, "forward", forward)
    engine(by)

    assert chosen == {seen}
    assert [layer.experts.choice.chosen for layer in by._layers] == [3, 0, 3]


def test_a_router_of_no_numbers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    node = models.node("mixtral")
    node.model.model.layers[0].mlp.gate.weight.data.fill_(torch.nan)

    with pytest.raises(UnsupportedArchitectureError, match="values that are not numbers"):
        engine(NativeDecoder(node, library(NAMES[-1]), threads=1))


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "sharers"), [(3, 2), (5, 1), (6, 3), (12, 2)])
def test_any_number_of_heads_is_attended_to_side_by_side(kv_heads: int, sharers: int) -> None:
    by_torch, node = (
        models.node(num_key_value_heads=kv_heads, num_attention_heads=kv_heads * sharers) for _ in range(2)
    )
    texts = prompts(*(70 + 9 * number for number in range(8)))

    found = answers(engine(NativeDecoder(node, library(NAMES[-1]), threads=1)), texts)

    assert found == answers(engine(by_torch), texts)
    assert len({token for answer in found for token in answer}) > 20


@pytest.mark.slow
def test_in_bfloat16_logits_are_nearer_to_the_exact_ones_than_transformers_are() -> None:
    exact, rounded = models.node(), models.node(dtype=torch.bfloat16)
    for parameter, stored in zip(exact.model.parameters(), rounded.model.parameters(), strict=True):
        parameter.data = stored.data.float()
    [text] = prompts(60)
    asked = torch.tensor(text)
    expected, theirs = (node.reference(asked).log_softmax(-1)[-1] for node in (exact, rounded))
    by_kernels = NativeDecoder(rounded, library(NAMES[-1]), threads=1)

    error, places = _error_of_scores(engine(by_kernels), text, expected)

    assert error < (theirs[places] - expected[places]).square().mean()


def _error_of_scores(
    by_kernels: KVEngine, text: list[int], expected: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """The mean squared error of log probabilities after a text, and the tokens that have them."""
    [[first]] = run(
        by_kernels, [SequenceSpec(key="0", prompt_ids=text, max_tokens=1, logprobs=200, ignore_eos=True)]
    ).values()
    assert isinstance(first, TokenOutput)
    assert first.score is not None
    places, found = (torch.tensor(column) for column in zip(*first.score.top, strict=True))
    return float((found - expected[places]).square().mean()), places


def test_packed_weights_are_let_go_of() -> None:
    node = models.node("llama")
    by_kernels = NativeDecoder(node, library(NAMES[-1]), threads=1)

    engine(by_kernels)
    engine(by_kernels)  # another over the same node asks for no weights

    sizes = {name: parameter.numel() for name, parameter in node.model.named_parameters()}
    assert {name for name, size in sizes.items() if size} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    assert by_kernels.parameters > 100_000


def test_kernels_that_compute_something_else_are_found_out_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder._to_c_step

    def shifted(step: Any, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Any:
        return right(step, sin, cos, *rest)

    monkeypatch.setattr(decoder, "_to_c_step", shifted)

    with pytest.raises(UnsupportedArchitectureError, match="differ from its own"):
        engine(NativeDecoder(models.node(), library(NAMES[-1]), threads=1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"head_dim": 16}, "heads of 16"),
        ({"hidden_size": 72}, "states of 72"),
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_torch_and_said(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    node = models.node(**changes)

    with caplog.at_level(logging.INFO):
        found = use_cpu_kernels(node, threads=1)

    assert found is node
    assert f"llm is computed by torch: the CPU kernels do not support {reason}" in caplog.text


def test_float16_is_left_to_torch() -> None:
    node = models.node(dtype=torch.float16)

    assert use_cpu_kernels(node, threads=1) is node


def quantised(name: str, *, bits: int, variant: str = NAMES[-1], **how: Any) -> NativeDecoder:
    return NativeDecoder(
        models.node(name, **how), library(variant), threads=2, quantisation=Quantisation(bits=bits)
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", models.MODELS)
def test_with_few_bits_layers_are_those_of_the_rounded_weights_and_inputs(
    name: str, bits: int, variant: str
) -> None:
    """The check at load compares with transformers' layers, of the same weights."""
    served = engine(quantised(name, bits=bits, variant=variant), max_step_tokens=9)

    found = answers(served, prompts(*LENGTHS))

    assert len({token for answer in found for token in answer}) > 20
    assert found != generated(name)


@pytest.mark.slow
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize(("name", "bits"), [("qwen3", 4), ("qwen3", 8), ("qwen3_moe", 4)])
def test_with_few_bits_probabilities_are_the_same_bits_alone_and_among_others(
    name: str, bits: int, variant: str
) -> None:
    specs = [
        SequenceSpec(key=str(number), prompt_ids=text, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
        for number, text in enumerate(prompts(150, 20, 33, 7, 80))
    ]
    by = quantised(name, bits=bits, variant=variant, dtype=torch.bfloat16)
    alone = engine(by, max_step_tokens=11, max_sequences=1)

    together = run(engine(by), specs, every=2)

    for spec in specs:
        [(key, found)] = run(alone, [spec]).items()
        assert [output.score for output in found] == [output.score for output in together[key]]


def test_eight_bits_are_nearer_to_the_floats_than_four() -> None:
    [text] = prompts(60)
    floats = Predictions.of(models.node().reference(torch.tensor(text)), text)

    errors = [
        float((predictions(quantised("qwen3", bits=bits), text).log_probs - floats.log_probs).abs().mean())
        for bits in (8, 4)
    ]

    assert errors[0] < errors[1] / 4
    assert predictions(quantised("qwen3", bits=8), text).agreement(floats) > 0.8


def test_a_wrong_number_is_found_out_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantisation_forms.rounded
    monkeypatch.setattr(quantisation_forms, "rounded", lambda x: right(x) * 1.5)

    with pytest.raises(UnsupportedArchitectureError, match="differ from its own"):
        engine(quantised("qwen3", bits=8))


def test_weights_are_computed_from_as_they_are_stored() -> None:
    node = models.node("qwen2")
    linear = node.model.model.layers[1].mlp.up_proj
    numbers = torch.full(linear.weight.shape, 7, dtype=torch.uint8)
    stored = GroupedWeight(4, numbers, torch.ones(len(numbers), 14) * 0.05)
    read = {"model.layers.1.mlp.up_proj": lambda: stored}
    node.stored_weights = read
    changed = models.node("qwen2")
    changed.model.model.layers[1].mlp.up_proj.weight.data = stored.floats()

    [text] = prompts(30)
    found, expected, plain = (
        predictions(NativeDecoder(one, library(NAMES[-1]), threads=1), text)
        for one in (node, changed, models.node("qwen2"))
    )

    assert (found.log_probs - expected.log_probs).abs().mean() < 0.05
    assert (found.log_probs - plain.log_probs).abs().mean() > 0.2


def quantised_in(node: DecoderLM, name: str, bits: int) -> GroupedWeight:
    """Return the weight of a linear layer in numbers of so many bits."""
    weight = node.model.get_submodule(name).weight.float()
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))
    groups = padded.view(len(padded), -1, 16 if bits == 6 else 32)
    scales = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
    numbers = (groups / scales[..., None]).round() + 2 ** (bits - 1)
    return GroupedWeight(bits, numbers.to(torch.uint8).flatten(1)[:, : weight.shape[1]].contiguous(), scales)


@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize(
    ("bits", "alone"), [((4, 4, 4), 0), ((4, 4, 6), 1), ((6, 6, 4), 1), ((4, 6, 6), 0), ((5, 5, 8), 1)]
)
def test_values_in_other_bits_than_queries_and_keys_are_packed_alone(
    bits: tuple[int, int, int], alone: int, variant: str
) -> None:
    node, changed = models.node("qwen2"), models.node("qwen2")
    names = [f"model.layers.1.self_attn.{kind}_proj" for kind in "qkv"]
    stored = {name: quantised_in(node, name, width) for name, width in zip(names, bits, strict=True)}
    node.stored_weights = {name: partial(stored.__getitem__, name) for name in names}
    for name in names:
        changed.model.get_submodule(name).weight.data = stored[name].floats()

    [text] = prompts(30)
    by = NativeDecoder(node, library(variant), threads=2)
    found = predictions(by, text)
    expected = Predictions.of(changed.reference(torch.tensor(text)), text)

    assert bool(by._layers[1].v.n) == bool(alone)
    assert not by._layers[0].v.n
    error = (found.log_probs - expected.log_probs).abs().mean()
    assert error < 0.1 * expected.log_probs.std()
    assert expected.log_probs.std() > 1


@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_experts_are_computed_from_as_they_are_stored(part: str) -> None:
    node, changed = models.node("qwen3_moe"), models.node("qwen3_moe")
    name = f"model.layers.2.mlp.experts.4.{part}"
    floats = matrix_named(changed.model, name).weight
    numbers = torch.full(floats.shape, 7, dtype=torch.uint8)
    stored = GroupedWeight(4, numbers, torch.ones(len(numbers), -(-floats.shape[1] // 32)) * 0.5)
    node.stored_weights = {name: lambda: stored}
    floats.copy_(stored.floats())

    [text] = prompts(60)
    found, expected, plain = (
        predictions(NativeDecoder(one, library(NAMES[-1]), threads=1), text)
        for one in (node, changed, models.node("qwen3_moe"))
    )

    assert (found.log_probs - expected.log_probs).abs().max() < 0.05
    assert (found.log_probs - plain.log_probs).abs().max() > 0.2


@pytest.mark.slow
def test_gpt_oss_is_computed_from_mxfp4_and_leaves_its_files(tmp_path: Path) -> None:
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 1000, "layers": 2}
    shape = GptOssShape(name="any", intermediate=160, experts=6, chosen=2, **sizes)
    checkpoint = write(tmp_path / "gpt-oss", shape)
    [text] = prompts(60)
    floats = load_decoder(checkpoint, "llm", dtype="float32")
    expected = Predictions.of(floats.reference(torch.tensor(text)), text)

    node = load_decoder(checkpoint, "llm", dtype="float32", leaves_weights=True)
    assert str(checkpoint) in Path("/proc/self/maps").read_text()
    del floats
    decoder = NativeDecoder(node, library(NAMES[-1]), threads=2)
    few = predictions(decoder, text)

    assert (few.log_probs - expected.log_probs).abs().mean() < 0.1 * expected.log_probs.std()
    assert few.agreement(expected) > 0.8
    assert len(set(expected.likeliest.tolist())) > 10
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()
    again = load_decoder(checkpoint, "llm", dtype="bfloat16", leaves_weights=True)
    engine(use_cpu_kernels(again, threads=2))  # passes the check at load


_OTHER_CHOICES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"normalises": 1},
    "qwen2_moe": {"factor": 2.0},
    "mixtral": {"is_sigmoid": 1},
    "glm4_moe": {"groups": 1},
    "dots1": {"factor": 1.0},
    "ernie4_5_moe": {"bias": None},
}


@pytest.mark.parametrize("name", _OTHER_CHOICES)
def test_another_choice_of_experts_is_found_out_at_load(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = layer_packing.LayerPacker._choice

    def wrong(packer: layer_packing.LayerPacker, router: Any) -> Choice:
        choice = right(packer, router)
        for field, value in _OTHER_CHOICES[name].items():
            setattr(choice, field, value)
        return choice

    monkeypatch.setattr(layer_packing.LayerPacker, "_choice", wrong)

    with pytest.raises(UnsupportedArchitectureError, match=r"Top[Kk]Router weighs experts otherwise"):
        NativeDecoder(models.node(name, dtype=torch.bfloat16), library(NAMES[-1]), threads=1)


def test_a_router_of_more_bits_than_the_layers_keeps_them() -> None:
    """Ernie's are float32. Here rows are nearly the same in bfloat16: the rest decides who is chosen."""
    by_torch, whole, rounded = (models.node("ernie4_5_moe", dtype=torch.bfloat16) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    for layers in zip(*(one.model.model.layers[1:] for one in (by_torch, whole, rounded)), strict=True):
        shape = layers[0].mlp.gate.weight.shape
        row, rest = (torch.randn(size, generator=generator) for size in (shape[1], shape))
        for layer in layers:
            layer.mlp.gate.weight.data = row.bfloat16().float() * (1 + rest.clamp(-1, 1) / 600)
            layer.mlp.gate.moe_statics.e_score_correction_bias.zero_()
    [text] = prompts(60)
    expected = by_torch.reference(torch.tensor(text)).log_softmax(-1)[-1]

    errors = []
    for node in (whole, rounded):
        native = NativeDecoder(node, library(NAMES[-1]), threads=1)
        by_kernels = engine(native)
        for layer in native._layers:
            assert (layer.experts.rest > 0) == (layer.experts.choice.count > 0)
            layer.experts.rest *= node is whole
        errors.append(_error_of_scores(by_kernels, text, expected)[0])

    assert errors[0] < errors[1] / 4


@pytest.mark.parametrize("count", [2, 1025])
def test_numbers_of_experts_that_cannot_be_are_left_to_torch(count: int) -> None:
    """Three of two, and more than the kernels can choose from."""
    node = models.node("qwen3_moe", num_experts=count, moe_intermediate_size=16)

    assert use_cpu_kernels(node, threads=1) is node


@pytest.mark.parametrize("limit", [None, 0.0, -1.0])
def test_experts_of_gpt_oss_without_a_limit_are_left_to_torch(limit: float | None) -> None:
    node = models.node("gpt_oss")
    for layer in node.model.model.layers:
        layer.mlp.experts.limit = limit

    assert use_cpu_kernels(node, threads=1) is node


def test_weights_are_left_in_the_files_only_of_classes_that_the_kernels_know() -> None:
    bodies = {name.replace("ForCausalLM", "Model").replace("Gemma3", "Gemma3Text") for name in CLASSES}

    assert bodies <= kernel_models._KINDS.keys()


def test_experts_that_saw_no_token_have_no_importance() -> None:
    model = models.node("qwen3_moe").model
    experts = model.model.layers[0].mlp.experts

    with quantisation_forms.observed_inputs([], [experts], {}) as found:
        model(torch.tensor([[1]]))

    assert len(found) == 9  # three experts saw the token
    assert all(weight.shape == (matrix.weight.shape[1],) for matrix, weight in found.items())


@pytest.mark.parametrize(("bits", "found"), [(None, 8), (4, 4), (8, 8)])
def test_what_is_stored_in_more_bits_is_quantised_further(bits: int | None, found: int) -> None:
    linear = models.node().model.model.layers[0].self_attn.o_proj
    stored = GroupedWeight(8, torch.full(linear.weight.shape, 130, dtype=torch.uint8), torch.ones(80, 4))
    by = library(NAMES[-1])
    context = by.open(1)
    packer = MatrixPacker(by, context, torch.float32)

    forms = Forms(packer, bits=bits, stored={linear: lambda: stored}, left={}, head=None, importance={})

    weight = forms.of(linear)
    by.close(context)
    assert isinstance(weight, GroupedWeight)
    assert weight.bits == found
    assert (weight is stored) == (found == 8)


def test_the_error_is_told_at_load(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", lambda: library(NAMES[-1]))
    [text] = prompts(40)

    with caplog.at_level(logging.INFO):
        use_cpu_kernels(models.node(), threads=1, quantisation=Quantisation(bits=8, measured=text))

    assert "llm: weights of int8: perplexity" in caplog.text
    assert "on a text of 40 tokens, with floats" in caplog.text


def test_what_cannot_be_quantised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedArchitectureError, match="quantize is int4, but the CPU kernels do not support"
    ):
        use_cpu_kernels(models.node(hidden_act="gelu"), threads=1, quantisation=Quantisation(bits=4))
    monkeypatch.setattr(kernels, "load", lambda: None)
    with pytest.raises(UnsupportedArchitectureError, match="are not available here"):
        use_cpu_kernels(models.node(), threads=1, quantisation=Quantisation(bits=4))
