"""Tokens are drafted where measured costs and acceptance make it pay, and nowhere else."""

from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.known_drafts import Knowing
from tests.workers.kv_engine.oracle import ids, run
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence import Acceptance, Sequence
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.speculative.payoff import LONGEST, Payoff
from workers.kv_engine.speculative.proposer import PromptLookup

FLAT = {1: 0.0100, 4: 0.0101, 16: 0.0105}
"""A step that takes as long as its weights take to be read."""
STEEP = {1: 0.010, 4: 0.040, 16: 0.160}
"""One that takes as long as its rows take to be computed."""


def payoff(costs: dict[int, float]) -> Payoff:
    made = Payoff()
    for rows, took_s in costs.items():
        made.observe_step(rows, took_s)
    return made


def length(made: Payoff, own: Acceptance, *, most: int = LONGEST, decodes: int = 1, drafts: int = 0) -> int:
    return made.length(own, most=most, decodes=decodes, rows=decodes + drafts)


def seen(made: Payoff, *, drafted: int, accepted: int, times: int = 20) -> Acceptance:
    own = Acceptance()
    for _ in range(times):
        made.observe_draft(own, drafted=drafted, accepted=accepted)
    return own


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert length(Payoff(), Acceptance()) == 0


def test_where_rows_cost_little_a_sequence_is_tried() -> None:
    assert length(payoff(FLAT), Acceptance()) > 0


def test_where_rows_cost_as_much_as_sequences_nothing_is_drafted_even_if_all_is_accepted() -> None:
    made = payoff(STEEP)
    assert length(made, seen(made, drafted=4, accepted=4)) == 0


def test_what_is_accepted_is_drafted_at_length() -> None:
    made = payoff(FLAT)
    assert length(made, seen(made, drafted=8, accepted=8)) == LONGEST


def test_what_is_not_accepted_is_drafted_no_more() -> None:
    made = payoff(FLAT | {4: 0.0115})
    assert length(made, seen(made, drafted=4, accepted=0)) == 0


def test_the_less_is_accepted_the_fewer_are_drafted() -> None:
    costs = {1: 0.010, 4: 0.012, 16: 0.020}
    lengths = []
    for accepted in (0, 1, 2, 4):
        made = payoff(costs)
        lengths.append(length(made, seen(made, drafted=4, accepted=accepted)))
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] < lengths[-1]


def test_a_slow_first_step_does_not_make_useless_drafts_seem_free() -> None:
    made = payoff({1: 0.050, 8: 0.012})
    assert length(made, Acceptance()) > 0
    assert length(made, seen(made, drafted=8, accepted=0)) == 0


def test_other_sequences_wait_for_a_draft_too() -> None:
    made = payoff({1: 0.010, 4: 0.013, 16: 0.025})
    own = seen(made, drafted=4, accepted=3)
    assert length(made, own, decodes=1) > length(made, own, decodes=16)


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    made = payoff(FLAT)
    assert length(made, seen(made, drafted=8, accepted=8), most=2) == 2
    assert length(made, seen(made, drafted=8, accepted=8), most=0) == 0


def test_a_sequence_without_drafts_is_tried_again_after_some_steps() -> None:
    made = payoff(FLAT | {4: 0.0115})
    own = seen(made, drafted=4, accepted=0)
    steps = 0
    while not length(made, own):
        made.observe_undrafted([own], decodes=1)
        steps += 1
        assert steps < 1000
    assert steps > 20


def test_one_slow_step_is_no_reason_for_ever() -> None:
    made = payoff({1: 0.030, 9: 0.500})
    steps = 0
    while not length(made, Acceptance()):
        made.observe_undrafted([], decodes=1)
        steps += 1
        assert steps < 1000
    assert steps > 50


def test_nothing_is_known_of_tokens_behind_the_first_wrong_one() -> None:
    early, late = Acceptance(), Acceptance()
    early.add(8, 1)
    late.add(2, 1)
    assert early.share(0.5) == late.share(0.5)


# ---- in an engine ------------------------------------------------------------------------------


def engine(node: DecoderLM, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 300, "block_size": 8, "max_step_tokens": 160, "max_sequences": 32}
    return make_engine(node, **(sizes | changes))


class _Told(Payoff):
    """Decides as if steps had these costs."""

    def __init__(self, costs: dict[int, float]) -> None:
        super().__init__()
        for rows, took_s in costs.items():
            super().observe_step(rows, took_s)

    def observe_step(self, rows: int, took_s: float) -> None:
        """Keep the told costs."""


@pytest.mark.parametrize("costs", [FLAT, STEEP])
def test_answers_are_those_without_drafts_and_the_record_says_what_was_drafted(
    qwen3: DecoderLM, costs: dict[int, float]
) -> None:
    def requests() -> list[SequenceSpec]:
        text = torch.randint(3, 90, (3, 6), generator=torch.Generator().manual_seed(2)).tolist()
        return [SequenceSpec(key=str(n), prompt_ids=one * 3, max_tokens=24) for n, one in enumerate(text)]

    expected = run(engine(qwen3), requests())
    knowing = Knowing({key: ids(found) for key, found in expected.items()})
    drafting = engine(qwen3, proposer=knowing, speculative_tokens=LONGEST, drafts_have_to_pay=True)
    assert drafting._drafter is not None
    drafting._drafter._payoff = _Told(costs)
    asked = requests()
    found = run(drafting, asked)

    for one in asked:
        assert ids(found[one.key]) == ids(expected[one.key]), one.key
    drafts = [one.work.drafts for one in asked]
    counters = drafting.stats().cache
    assert sum(one.drafted for one in drafts) == counters.drafted
    assert sum(one.accepted for one in drafts) == counters.accepted
    assert bool(counters.accepted) == (costs is FLAT)
    assert all(one.declined_steps for one in drafts) == (costs is STEEP)


def test_the_first_draft_of_a_sequence_is_no_measure_of_others(qwen3: DecoderLM) -> None:
    drafting = engine(qwen3, proposer=PromptLookup(), speculative_tokens=LONGEST, drafts_have_to_pay=True)
    told = _Told(FLAT)
    observed: list[int] = []
    told.observe_step = lambda rows, took_s: observed.append(rows)  # type: ignore[method-assign]
    assert drafting._drafter is not None
    drafting._drafter._payoff = told
    drafting.add(SequenceSpec(key="a", prompt_ids=[5, 6, 7] * 4, max_tokens=12))
    for _ in range(2):  # the prompt, and the step with the first draft
        drafting.step()
    assert not observed
    drafting.step()
    assert observed


def test_nothing_is_drafted_beside_a_prompt(qwen3: DecoderLM) -> None:
    drafting = engine(qwen3, proposer=PromptLookup(), speculative_tokens=LONGEST, drafts_have_to_pay=True)
    assert drafting._drafter is not None
    drafting._drafter._payoff = _Told(FLAT)
    seen_spans: list[tuple[int, int]] = []
    propose = drafting._drafter._proposer.propose

    def noted(sequences: list[Sequence], most: list[int]) -> list[list[int]]:
        seen_spans.append((len(sequences), max(most)))
        return propose(sequences, most)

    drafting._drafter._proposer.propose = noted  # type: ignore[method-assign,assignment]
    drafting.add(SequenceSpec(key="a", prompt_ids=[5, 6, 7] * 4, max_tokens=12))
    drafting.step()
    drafting.add(SequenceSpec(key="b", prompt_ids=[8, 9, 10] * 4, max_tokens=12))
    drafting.step()

    assert seen_spans[-1] == (1, 0)
    while drafting.has_work:
        drafting.step()
    assert any(most for _, most in seen_spans)
