"""Blocks before the window of all layers are given back: a text may be longer than the pool."""

from dataclasses import replace
from typing import Any

import pytest

from models.decoder_lm.nodes import load
from shared.errors import ClientError
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import clear_text, ids, run
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence_spec import KvExport, SequenceSpec
from workers.kv_engine.speculative.proposer import PromptLookup

WINDOWED: list[Family] = ["mistral", "phi3"]
NEW_TOKENS = 64
BLOCKS = 10
"""80 tokens: fewer than a text of 66 and its answer, more than a window of 24 beside a step of 9."""


def engine_of(family: Family, **changes: Any) -> KVEngine:
    settings: dict[str, Any] = {
        "num_blocks": BLOCKS,
        "block_size": 8,
        "max_step_tokens": 9,
        "max_sequences": 4,
    }
    return make_engine(load(tiny_checkpoint(family)), **settings | changes)


def spec(key: str, text: list[int], max_tokens: int = NEW_TOKENS) -> SequenceSpec:
    return SequenceSpec(key=key, prompt_ids=text, max_tokens=max_tokens)


@pytest.mark.parametrize("family", WINDOWED)
def test_texts_longer_than_the_pool_are_answered_as_generate_does(family: Family) -> None:
    text, expected = clear_text(family, 66, NEW_TOKENS)
    engine = engine_of(family)

    assert ids(run(engine, [spec("a", text)])["a"]) == expected
    # 130 tokens, the last one not computed: of 129, those before the window of 24 fill 13 whole blocks.
    assert engine.stats().cache.unread_blocks == 13
    assert engine.stats().kv_used == 0


@pytest.mark.parametrize("family", WINDOWED)
def test_a_prompt_longer_than_the_pool_is_computed_in_pieces(family: Family) -> None:
    text, expected = clear_text(family, 100, 8)
    engine = engine_of(family)

    assert ids(run(engine, [spec("a", text, 8)])["a"]) == expected


@pytest.mark.parametrize("family", WINDOWED)
def test_sequences_that_preempt_one_another_answer_as_generate_does(family: Family) -> None:
    texts = {str(length): clear_text(family, length, NEW_TOKENS) for length in (15, 38, 66, 67)}
    engine = engine_of(family, num_blocks=12)

    found = run(engine, [spec(key, text) for key, (text, _) in texts.items()], every=3)

    assert {key: ids(found[key]) for key in texts} == {key: answer for key, (_, answer) in texts.items()}
    assert engine.stats().cache.preemptions
    assert engine.stats().kv_used == 0


@pytest.mark.parametrize("family", WINDOWED)
def test_prefixes_are_reused_and_answers_resumed(family: Family) -> None:
    text, expected = clear_text(family, 66, NEW_TOKENS)
    engine = engine_of(family, num_blocks=30)
    run(engine, [spec("first", text)])

    again = run(engine, [spec("again", text)])
    hits = engine.stats().cache.hits
    resumed = run(engine, [replace(spec("resumed", text), prefix_ids=expected[:40])])

    assert ids(again["again"]) == expected
    assert hits == 64
    assert ids(resumed["resumed"]) == expected[40:]
    assert engine.stats().cache.hits > hits


@pytest.mark.parametrize("family", WINDOWED)
def test_a_cached_prefix_without_its_beginning_is_computed_again(family: Family) -> None:
    """The pool of 80 tokens has evicted the beginnings of the first text while it was answered."""
    text, expected = clear_text(family, 66, NEW_TOKENS)
    engine = engine_of(family)

    for key in ("first", "again", "third"):
        assert ids(run(engine, [spec(key, text)])[key]) == expected


@pytest.mark.parametrize("family", WINDOWED)
def test_drafts_do_not_change_the_answer(family: Family) -> None:
    text, expected = clear_text(family, 66, NEW_TOKENS)
    engine = engine_of(family, proposer=PromptLookup(), speculative_tokens=3)

    assert ids(run(engine, [spec("a", text)])["a"]) == expected


@pytest.mark.parametrize("family", WINDOWED)
def test_a_block_given_back_too_early_is_detected(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one block more is given back, and the sequence's next tokens overwrite it.

    Blocks of 7 do not divide the window; blocks of 8 would be overwritten just after their last reading.
    """
    text, expected = clear_text(family, 66, NEW_TOKENS)
    settings: dict[str, Any] = {"num_blocks": 12, "block_size": 7, "prefix_cache": False}
    assert ids(run(engine_of(family, **settings), [spec("a", text)])["a"]) == expected

    unread = Scheduler._unread
    monkeypatch.setattr(
        Scheduler, "_unread", lambda self, one, computed: (n := unread(self, one, computed)) + (n > 0)
    )

    assert ids(run(engine_of(family, **settings), [spec("a", text)])["a"]) != expected


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_model_with_a_layer_that_sees_all_keeps_all(family: Family) -> None:
    engine = engine_of(family)

    with pytest.raises(ClientError, match="the size of the KV cache is 80 tokens"):
        engine.add(spec("a", list(range(66))))


def test_a_sequence_that_is_exported_keeps_all() -> None:
    def export_to(*_: object, **__: object) -> Any:
        raise AssertionError("nothing is exported")

    engine = engine_of("mistral", export_to=export_to)

    with pytest.raises(ClientError, match="the size of the KV cache is 80 tokens"):
        engine.add(replace(spec("a", list(range(66))), export=KvExport(key="kv", scope="a")))
