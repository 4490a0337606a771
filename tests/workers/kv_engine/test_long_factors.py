"""Long rotary factors: every text is answered as `generate` answers it alone, below and beyond the change.

Up to `CHANGE` tokens a text has short factors. Beyond, it has long ones from its first token on: `generate`
computes all keys again when an answer grows past the change.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models.checkpoints.files import UnsupportedArchitectureError
from models.decoder_lm.nodes import DecoderLM, load
from models.transformers_lm.architecture import body_of
from models.transformers_lm.longrope import LongFactors
from shared.errors import ClientError, TensorGone
from tests.tiny import tiny_checkpoint
from tests.tiny.phi import CHANGE
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.known_drafts import Knowing
from tests.workers.kv_engine.oracle import (
    clear_text,
    generate,
    ids,
    log_softmax,
    prompts,
    run,
    run_all,
    scores,
)
from tests.workers.kv_engine.recorder import Again
from tests.workers.kv_engine.shared_node import parts, shared
from tests.workers.kv_engine.test_kv_transfer import Slots
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import StepFailedError
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import Sequence as Row
from workers.kv_engine.sequence_spec import KvExport, SequenceSpec
from workers.kv_engine.speculative.draft_model import DraftModel

NEW_TOKENS = 24
CROSSING = [CHANGE - 12, CHANGE - 2, CHANGE - 1, CHANGE]
"""Prompts below the change, or at it, whose answers grow past it."""
LENGTHS = [20, *CROSSING, CHANGE + 1, CHANGE + 2, 2 * CHANGE + 40]
EXPORT = KvExport(key="kv", scope="r/1/2")


@pytest.fixture(scope="module")
def node() -> DecoderLM:
    return load(tiny_checkpoint("phi3_longrope"))


def engine(node: DecoderLM, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 400, "block_size": 8, "max_step_tokens": 50, "max_sequences": 8}
    return make_engine(node, **(sizes | changes))


def asked(length: int, **changes: Any) -> tuple[SequenceSpec, list[int]]:
    """Return a request with a prompt of so many tokens, and the answer of `generate`."""
    text, expected = clear_text("phi3_longrope", length, NEW_TOKENS)
    spec = SequenceSpec(key=str(length), prompt_ids=text, max_tokens=NEW_TOKENS)
    return replace(spec, **changes), expected


def all_asked(lengths: Sequence[int] = LENGTHS) -> tuple[list[SequenceSpec], dict[str, list[int]]]:
    specs, answers = zip(*(asked(length) for length in lengths), strict=True)
    return list(specs), {spec.key: answer for spec, answer in zip(specs, answers, strict=True)}


def answers(of: KVEngine, specs: list[SequenceSpec], *, every: int = 0) -> dict[str, list[int]]:
    return {key: ids(outputs) for key, outputs in run(of, specs, every=every).items()}


# ---- the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
def test_texts_on_both_sides_of_the_change_answer_as_alone(node: DecoderLM, every: int) -> None:
    """Fifty tokens a step: prompts are cut, next to decodes of both kinds."""
    specs, expected = all_asked()
    mixed = engine(node)

    assert answers(mixed, specs, every=every) == expected
    assert mixed.stats().cache.changed_factors == len(CROSSING)
    assert mixed.stats().kv_used == 0


def test_a_text_alone_in_one_step_answers_as_generate_does(node: DecoderLM) -> None:
    one = engine(node, max_step_tokens=512, prefix_cache=False)
    specs, expected = all_asked()

    assert {spec.key: answers(one, [spec])[spec.key] for spec in specs} == expected


def test_an_answer_is_computed_again_once_when_it_outgrows_the_short_factors(node: DecoderLM) -> None:
    spec, expected = asked(CHANGE - 12)
    one = engine(node, prefix_cache=False)

    assert answers(one, [spec])[spec.key] == expected
    # All but the last sampled token, and once more those with short factors.
    assert one.stats().work.computed_tokens == len(spec.prompt_ids) + NEW_TOKENS - 1 + CHANGE
    assert one.stats().cache.changed_factors == 1
    assert one.stats().cache.preemptions == 0


def test_a_text_that_ends_at_the_change_is_not_computed_again(node: DecoderLM) -> None:
    """The last token is sampled with as many tokens as have short factors."""
    spec, expected = asked(CHANGE - 12, max_tokens=13)
    one = engine(node)

    assert answers(one, [spec])[spec.key] == expected[:13]
    assert one.stats().cache.changed_factors == 0


def test_texts_that_preempt_one_another_answer_as_alone(node: DecoderLM) -> None:
    specs, expected = all_asked([20, CHANGE - 42, CHANGE - 20, CHANGE - 12, CHANGE + 2])
    small = engine(node, num_blocks=73, max_step_tokens=200, prefix_cache=False)

    assert answers(small, specs) == expected
    assert small.stats().cache.preemptions > 0
    assert small.stats().cache.changed_factors == 2
    assert small.stats().kv_used == 0


@pytest.mark.parametrize("released", [1, 11, 12, 13, 20])
def test_a_resumed_answer_continues_as_generate_does(node: DecoderLM, released: int) -> None:
    """With 12 released tokens, the text has as many tokens as have short factors."""
    spec, expected = asked(CHANGE - 12)
    resumed = replace(spec, prefix_ids=expected[:released])
    one = engine(node)

    assert answers(one, [resumed])[spec.key] == expected[released:]
    assert one.stats().cache.changed_factors == (released <= 12)


def test_prefixes_are_shared_among_texts_of_one_kind_only(node: DecoderLM) -> None:
    text, expected = clear_text("phi3_longrope", 2 * CHANGE, NEW_TOKENS)
    short = text[: CHANGE // 2]
    one = engine(node)

    run(one, [SequenceSpec(key="short", prompt_ids=short, max_tokens=1)])
    first = answers(one, [SequenceSpec(key="long", prompt_ids=text, max_tokens=NEW_TOKENS)])
    assert one.stats().cache.hits == 0
    again = answers(one, [SequenceSpec(key="long", prompt_ids=text, max_tokens=NEW_TOKENS)])

    assert first["long"] == again["long"] == expected
    assert one.stats().cache.hits == 2 * CHANGE - 8  # all but the last block
    run(one, [SequenceSpec(key="short", prompt_ids=short, max_tokens=1)])
    assert one.stats().cache.hits == 2 * CHANGE - 8 + CHANGE // 2 - 8


def test_an_answer_reuses_what_an_equal_one_computed_after_the_change(node: DecoderLM) -> None:
    spec, expected = asked(CHANGE - 12)
    one = engine(node)
    run(one, [spec])
    before = one.stats().work.computed_tokens

    assert answers(one, [spec])[spec.key] == expected
    assert one.stats().cache.changed_factors == 2
    assert one.stats().work.computed_tokens - before < 2 * NEW_TOKENS


def test_scores_of_a_long_prompt_have_long_factors(node: DecoderLM) -> None:
    spec, _ = asked(CHANGE + 2, logprobs=0, scores_prompt=True, max_tokens=1)
    expected = log_softmax("phi3_longrope", spec.prompt_ids)

    found = scores(run_all(engine(node), [spec])[spec.key])

    for index, score in enumerate(found[: len(spec.prompt_ids) - 1]):
        assert score.logprob == pytest.approx(float(expected[index, spec.prompt_ids[index + 1]]), abs=1e-3)


def test_longer_texts_than_the_model_was_made_for_are_refused(node: DecoderLM) -> None:
    with pytest.raises(ClientError, match="the model's context length is 512 tokens"):
        engine(node).add(SequenceSpec(key="a", prompt_ids=[1] * 500, max_tokens=13))


# ---- moved to another engine -----------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_a_text_that_continues_in_another_engine_answers_as_in_one(node: DecoderLM, length: int) -> None:
    """Keys with short factors are of no use to the first token past the change, and are not imported."""
    spec, expected = asked(length)
    slots, read = Slots(), list[str]()
    run(engine(node, export_to=slots.allocate), [replace(spec, max_tokens=1, export=EXPORT)])
    other = engine(node, block_size=5)

    rest = replace(spec, prefix_ids=expected[:1], kv=slots.read(), on_kv_read=lambda: read.append("read"))

    assert answers(other, [rest])[spec.key] == expected[1:]
    assert read == ["read"]
    computed = NEW_TOKENS - 1 + (CHANGE if length in CROSSING else 0)
    assert other.stats().work.computed_tokens == computed


@pytest.mark.parametrize("moved_after", [11, 13, 14])
def test_an_answer_moves_just_before_and_after_the_change(node: DecoderLM, moved_after: int) -> None:
    spec, expected = asked(CHANGE - 12)
    slots = Slots()
    first = replace(spec, max_tokens=moved_after, export=EXPORT)
    assert answers(engine(node, export_to=slots.allocate), [first])[spec.key] == expected[:moved_after]

    rest = replace(spec, prefix_ids=expected[:moved_after], kv=slots.read())

    assert answers(engine(node), [rest])[spec.key] == expected[moved_after:]


def test_keys_that_are_gone_fail_the_text_that_cannot_use_them(node: DecoderLM) -> None:
    """It is reported as for any other: the sender may have given the memory to another tensor."""

    def gone() -> None:
        raise TensorGone("the keys are gone")

    spec, expected = asked(CHANGE)
    slots = Slots()
    run(engine(node, export_to=slots.allocate), [replace(spec, max_tokens=1, export=EXPORT)])
    rest = replace(spec, prefix_ids=expected[:1], kv=slots.read(), on_kv_read=gone)

    with pytest.raises(StepFailedError, match="the keys are gone"):
        run(engine(node), [rest])


# ---- drafts, recorded steps, groups ----------------------------------------------------------------


def test_drafts_never_reach_past_the_change(node: DecoderLM) -> None:
    specs, expected = all_asked()
    drafting = engine(
        node, proposer=Knowing(expected), speculative_tokens=5, max_step_tokens=100, prefix_cache=False
    )

    assert answers(drafting, specs) == expected
    assert drafting.stats().cache.accepted > 3 * NEW_TOKENS
    assert drafting.stats().cache.changed_factors == len(CROSSING)


def test_a_draft_model_with_long_factors_drafts_on_both_sides(node: DecoderLM) -> None:
    specs, expected = all_asked([20, *CROSSING, CHANGE + 2])
    draft = DraftModel(
        load(tiny_checkpoint("phi3_longrope")),
        served="llm",
        num_blocks=400,
        block_size=8,
        max_sequences=8,
        max_step_tokens=100,
    )
    drafting = engine(node, proposer=draft, speculative_tokens=4, max_step_tokens=100)

    assert answers(drafting, specs) == expected
    counts = drafting.stats().cache
    assert counts.accepted == counts.drafted > 3 * NEW_TOKENS


def test_recorded_steps_choose_the_factors_of_each_text(node: DecoderLM) -> None:
    specs, expected = all_asked()
    capture = Again()
    recorded = engine(node, capture=capture)

    assert answers(recorded, specs, every=1) == expected
    assert capture.replays > NEW_TOKENS
    assert recorded.stats().work.ahead > 0
    assert recorded.stats().cache.changed_factors == len(CROSSING)


@pytest.mark.processes
def test_two_that_share_the_node_answer_as_generate_does() -> None:
    specs, expected = all_asked([20, CHANGE - 12, CHANGE, CHANGE + 2])
    sizes = {"num_blocks": 400, "block_size": 8, "max_step_tokens": 50, "max_sequences": 8}

    with shared(parts("phi3_longrope"), sizes) as engines:
        assert answers(engines.leader, specs, every=1) == expected
        assert engines.leader.stats().cache.changed_factors == 2


def test_scaling_that_depends_on_the_length_is_that_of_the_factors(tmp_path: Path) -> None:
    """Phimoe, as Phi-3.5-MoE: its angles are scaled by other numbers beyond the change."""
    change = 64
    torch.manual_seed(0)
    factors = {
        "long_factor": [1.5, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0],
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0],
    }
    config = transformers.PhimoeConfig(
        hidden_size=64,
        initializer_range=0.2,
        intermediate_size=64,
        max_position_embeddings=256,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        num_local_experts=4,
        original_max_position_embeddings=change,
        sliding_window=None,
        vocab_size=512,
        rope_parameters={
            **factors,
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_mscale": 1.3,
            "short_mscale": 1.1,
            "original_max_position_embeddings": change,
        },
    )
    stock = transformers.PhimoeForCausalLM(config).eval()
    stock.save_pretrained(tmp_path)
    lengths = (20, change - 10, change, change + 1, 2 * change)
    texts = {str(length): prompts(1, seed=length, shortest=length, longest=length)[0] for length in lengths}
    expected = {
        key: stock.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(text) :].tolist()
        for key, text in texts.items()
    }

    mixed = engine(load(tmp_path))
    found = answers(
        mixed, [SequenceSpec(key=key, prompt_ids=text, max_tokens=NEW_TOKENS) for key, text in texts.items()]
    )

    assert found == expected
    assert mixed.stats().cache.changed_factors == 2


# ---- negative controls -----------------------------------------------------------------------------


def test_short_factors_beyond_the_change_give_other_tokens() -> None:
    other = load(tiny_checkpoint("phi3_longrope"))
    rotary = body_of(other.model).rotary_emb
    rotary.long_inv_freq = rotary.original_inv_freq.clone()
    specs, expected = all_asked()

    found = answers(engine(other), specs)

    assert {key for key in found if found[key] != expected[key]} == {str(n) for n in LENGTHS if n > 20}


def test_without_computing_again_an_answer_has_other_tokens(
    node: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_alone(self: Scheduler) -> None:
        for sequence in self.running:
            sequence.long_factors = sequence.needs_long_factors(len(sequence.ids))

    monkeypatch.setattr(Scheduler, "_change_factors", change_alone)
    specs, expected = all_asked()

    found = answers(engine(node), specs)

    assert {key for key in found if found[key] != expected[key]} == {str(length) for length in CROSSING}


def test_prefixes_shared_by_texts_of_both_kinds_give_other_tokens(
    node: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = clear_text("phi3_longrope", 2 * CHANGE, NEW_TOKENS)
    monkeypatch.setattr(Row, "shared_root", property(lambda self: self.spec.shared_root))
    one = engine(node)
    run(one, [SequenceSpec(key="short", prompt_ids=text[: CHANGE // 2], max_tokens=1)])

    found = answers(one, [SequenceSpec(key="long", prompt_ids=text, max_tokens=NEW_TOKENS)])

    assert found["long"] != expected


def test_factors_chosen_for_the_batch_are_refused_by_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers rotates all sequences of a batch by the length of the longest."""
    of = LongFactors.of
    monkeypatch.setattr(LongFactors, "of", lambda self, _: of(self, None))

    with pytest.raises(UnsupportedArchitectureError, match="Phi3ForCausalLM is not served: over the paged"):
        engine(load(tiny_checkpoint("phi3_longrope")))


def test_the_oracle_itself_changes_factors_after_the_last_short_text() -> None:
    """`generate` continues a text of `CHANGE` tokens as one that begins with long factors."""
    spec, expected = asked(CHANGE)

    assert generate("phi3_longrope", [*spec.prompt_ids, expected[0]], NEW_TOKENS - 1) == expected[1:]
