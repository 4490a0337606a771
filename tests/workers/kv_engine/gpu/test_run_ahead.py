"""Steps launched ahead give the same tokens as steps that are read before the next launch."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from shared.telemetry import timeline
from tests.timelines import read_events
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.gpu.test_cuda_graphs import SAMPLINGS
from tests.workers.kv_engine.oracle import ids, prompts, run, scores, tokens
from tests.workers.kv_engine.recorder import Again
from tests.workers.kv_engine.sampling.test_grammar_masks import compiled, processing_of
from tests.workers.kv_engine.test_kv_transfer import Slots
from tests.workers.kv_engine.test_scheduler import same, scheduler, sequence, shape
from workers.data_plane.port import Array
from workers.kv_engine import runner
from workers.kv_engine.counters import WorkCounters
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.run_ahead import plan_step_ahead
from workers.kv_engine.outputs import Output, StepFailedError
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import FinishReason, KvExport, Sampling, SequenceSpec
from workers.kv_engine.speculative.proposer import PromptLookup

# ---- who is in it --------------------------------------------------------------------------------


def decoding(of: Scheduler, *sequences: Sequence) -> list[Span]:
    """Let all in, sample their first tokens, and begin with their next."""
    for one in sequences:
        of.add(one)
    spans = of.schedule()
    of.advance(spans)
    for span in spans:
        span.sequence.ids.append(0)
    return of.schedule()


def test_a_step_that_may_outgrow_rotary_factors_is_not_launched_ahead() -> None:
    """With the unread token, the sequence has one more than may have short factors."""
    of = scheduler(rotary_change=5)
    one = Sequence(sequence("a", 3, max_tokens=9).spec, rotary_change=5)
    spans = decoding(of, one)

    behind = plan_step_ahead(spans, of)

    assert behind is not None
    assert shape(behind) == [("a", 4, 1)]
    of.advance(spans)
    one.ids.append(0)
    assert plan_step_ahead(of.schedule(), of) is None


def test_behind_a_step_of_decodes_come_the_next_positions_of_the_same() -> None:
    of = scheduler(rows=2)
    spans = decoding(of, sequence("a", 3), sequence("b", 5))
    assert shape(spans) == [("a", 3, 1), ("b", 5, 1)]

    behind = plan_step_ahead(spans, of)

    assert behind is not None
    assert shape(behind) == [("a", 4, 1), ("b", 6, 1)]


def test_who_has_all_tokens_by_then_is_not_in_it() -> None:
    of = scheduler(rows=2)
    spans = decoding(of, sequence("a", 3, max_tokens=2), sequence("b", 5, max_tokens=3))

    behind = plan_step_ahead(spans, of)

    assert behind is not None
    assert shape(behind) == [("b", 6, 1)]


def test_where_all_have_their_tokens_there_is_none() -> None:
    of = scheduler()

    assert plan_step_ahead(decoding(of, sequence("a", 3, max_tokens=2)), of) is None


def test_who_grows_in_it_has_a_block_for_it() -> None:
    """Blocks of two tokens: after its fourth token `a` needs a third block, and `b` has room."""
    of = scheduler(rows=2)
    a, b = sequence("a", 3), sequence("b", 4)
    spans = decoding(of, a, b)
    before = len(a.blocks), len(b.blocks), of.blocks.free

    assert plan_step_ahead(spans, of) is not None

    assert before == (2, 3, 95)
    assert (len(a.blocks), len(b.blocks), of.blocks.free) == (3, 3, 94)


def test_without_a_block_for_all_that_grow_it_waits_and_nobody_has_taken_any() -> None:
    of = scheduler(blocks=5, rows=2, prefix_cache=False)
    a, b = sequence("a", 3), sequence("b", 3)
    spans = decoding(of, a, b)

    assert of.blocks.free == 1
    assert plan_step_ahead(spans, of) is None
    assert (len(a.blocks), len(b.blocks), of.blocks.free) == (2, 2, 1)


def test_who_waits_and_fits_is_waited_for() -> None:
    of = scheduler(rows=2)
    spans = decoding(of, sequence("a", 3))

    of.add(sequence("b", 3))

    assert plan_step_ahead(spans, of) is None


def test_who_waits_and_cannot_be_let_in_is_not_waited_for() -> None:
    of = scheduler(rows=1)
    spans = decoding(of, sequence("a", 3))

    of.add(sequence("b", 3))

    assert plan_step_ahead(spans, of) is not None


def test_who_waits_for_what_another_computes_is_not_waited_for() -> None:
    """`a` brings keys and values of three tokens: of its first block, which `b` wants, too."""
    of = scheduler(rows=2)
    brought = Array(dtype="float32", shape=(1, 2, 3, 1, 1), data=np.zeros(24, np.uint8))
    of.add(same("a", 4, kv=brought))
    spans = of.schedule()
    assert shape(spans) == [("a", 3, 1)]

    of.add(same("b", 7))

    assert plan_step_ahead(spans, of) is not None


def test_a_row_that_is_left_in_the_step_under_way_is_given_to_who_waits() -> None:
    of = scheduler(rows=2)
    spans = decoding(of, sequence("a", 3, max_tokens=2), sequence("b", 3))

    of.add(sequence("c", 3))

    assert plan_step_ahead(spans, of) is None


def test_who_was_resumed_is_waited_for_and_who_is_held_is_not() -> None:
    of = scheduler(rows=2)
    a, b = sequence("a", 3), sequence("b", 3)
    spans = decoding(of, a, b)[:1]
    assert spans[0].sequence is a

    assert plan_step_ahead(spans, of) is None
    b.held = True
    assert plan_step_ahead(spans, of) is not None


def test_whose_logits_hang_on_the_last_token_is_waited_for() -> None:
    of = scheduler(rows=2)
    words = Sampling(bad_words=((3, 4),))
    spans = decoding(of, sequence("a", 3), sequence("b", 3, sampling=words))

    assert plan_step_ahead(spans, of) is None


# ---- what it leads to ----------------------------------------------------------------------------


def engine(node: DecoderLM, *, runs_ahead: bool = True, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 24, "max_sequences": 6}
    made = make_engine(node, **({"capture": Again()} | sizes | changes))
    made.runs_ahead = made.runs_ahead and runs_ahead
    return made


def spec(key: str = "a", **changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {"key": key, "prompt_ids": [5, 6, 7, 8], "max_tokens": 12}
    return SequenceSpec(**(values | changes))


def work(of: KVEngine) -> WorkCounters:
    return of.stats().work


def left(of: KVEngine) -> list[Output]:
    """Run the engine until there is no work left, and return the outputs."""
    outputs: list[Output] = []
    while of.has_work:
        outputs += of.step()
    return outputs


def answer(node: DecoderLM, one: SequenceSpec) -> list[int]:
    return ids(run(engine(node, runs_ahead=False), [one])[one.key])


def test_all_steps_but_the_first_two_of_an_answer_are_launched_ahead(qwen3: DecoderLM) -> None:
    ahead = engine(qwen3)

    outputs = run(ahead, [spec()])["a"]

    assert ids(outputs) == answer(qwen3, spec())
    assert [output.step for output in outputs] == list(range(1, 13))
    assert (work(ahead).ahead, work(ahead).discarded_tokens, ahead.forwards) == (10, 0, 12)
    assert (work(ahead).sampled_tokens, work(ahead).computed_tokens) == (12, 4 + 11)
    assert work(ahead).step_s.count == 12


def test_log_probabilities_of_steps_under_way_are_those_of_steps_read_first(qwen3: DecoderLM) -> None:
    """A sequence without them is cancelled, and one with them ends, while the next step is under way."""
    wishes = [spec("a", logprobs=2), spec("b", prompt_ids=[9, 9, 9]), spec("c", prompt_ids=[3], logprobs=0)]
    wishes[2] = replace(wishes[2], max_tokens=5)

    def outputs_of(one: KVEngine) -> dict[str, list[Output]]:
        found: dict[str, list[Output]] = {wish.key: [] for wish in wishes}
        for wish in wishes:
            one.add(wish)
        while one.has_work:
            for output in one.step():
                found[output.key].append(output)
            if len(found["b"]) == 3:
                one.cancel("b")
        return found

    ahead = engine(qwen3)
    found, expected = outputs_of(ahead), outputs_of(engine(qwen3, runs_ahead=False))

    assert work(ahead).ahead > 6
    assert [len(outputs) for outputs in found.values()] == [12, 3, 5]
    for key in ("a", "c"):
        assert ids(found[key]) == ids(expected[key])
        told, meant = scores(found[key]), scores(expected[key])
        # A step under way has one row more, of what was cancelled, so sums may be rounded otherwise.
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in meant], abs=1e-4)
        assert [[token for token, _ in one.top] for one in told] == [
            [token for token, _ in one.top] for one in meant
        ]
        assert [one.token_id for one in scores(found[key])] == ids(found[key])


def test_each_call_gives_the_tokens_of_one_step_while_the_next_is_under_way(qwen3: DecoderLM) -> None:
    ahead = engine(qwen3, max_sequences=2)
    ahead.add(spec("a", max_tokens=4))
    ahead.add(spec("b", max_tokens=6))

    told = [(ahead.step(), ahead.step_keys, ahead.forwards, ahead.has_work) for _ in range(6)]

    assert [[(o.key, o.step) for o in outputs] for outputs, *_ in told] == [
        [("a", n), ("b", n)] if n <= 4 else [("b", n)] for n in range(1, 7)
    ]
    assert [keys for _, keys, *_ in told] == [("a", "b")] * 4 + [("b",)] * 2
    assert [forwards for *_, forwards, _ in told] == [1, 3, 4, 5, 6, 6]
    assert [has_work for *_, has_work in told] == [True] * 5 + [False]


@pytest.mark.slow
def test_where_somebody_guesses_or_who_is_asked_not_to_nothing_runs_ahead(qwen3: DecoderLM) -> None:
    for one in (engine(qwen3, proposer=PromptLookup()), engine(qwen3, runs_ahead=False)):
        assert ids(run(one, [spec()])["a"]) == answer(qwen3, spec())
        assert work(one).ahead == 0


@pytest.mark.slow
def test_beside_guided_answers_nothing_runs_ahead_and_behind_them_it_does(
    qwen3: DecoderLM,
) -> None:
    ends = frozenset(processing_of().eos_ids)
    wishes = [
        spec("plain", max_tokens=20),
        spec("guided", guide=compiled(regex="[a-f]{5,9}"), eos_ids=ends),
        spec("words", max_tokens=8, sampling=Sampling(bad_words=((3, 4),))),
    ]
    ahead = engine(qwen3)

    found = {key: ids(outputs) for key, outputs in run(ahead, wishes).items()}

    assert found == {one.key: answer(qwen3, one) for one in wishes}
    longest = max(len(found["guided"]), len(found["words"]))
    assert work(ahead).ahead == 20 - longest - 1
    assert work(ahead).discarded_tokens == 0


@pytest.mark.slow
def test_penalties_count_the_unread_token_on_the_device(qwen3: DecoderLM) -> None:
    """Alone and beside others; a token that is new, in the prompt, generated before, or of no interest."""
    ends = frozenset(range(0, 400, 2))
    favoured = Sampling(logit_bias=tuple((n, 6.0) for n in range(4, 8)))  # of the prompt and of no interest
    samplings = {
        "repetition": replace(favoured, repetition_penalty=1.5),
        "presence": replace(favoured, presence_penalty=4.0, temperature=1.5, seed=2),
        "frequency": replace(favoured, frequency_penalty=2.0, top_p=0.9, temperature=1.5, seed=3),
        "bias": replace(favoured, temperature=1.5, seed=4),
        "both": replace(favoured, frequency_penalty=1.5, repetition_penalty=1.2),
        "late": Sampling(min_tokens=9, temperature=1.5, seed=5),
        "plain": Sampling(temperature=1.5, seed=6),
    }
    wishes = [
        spec(key, max_tokens=25, sampling=sampling, eos_ids=ends if key == "late" else frozenset())
        for key, sampling in samplings.items()
    ]
    expected = {one.key: answer(qwen3, one) for one in wishes}
    ahead = engine(qwen3, max_sequences=len(wishes))

    found = {key: ids(outputs) for key, outputs in run(ahead, wishes).items()}

    assert found == expected
    assert work(ahead).ahead == 23
    assert len(found["late"]) >= 10
    assert found["both"] != answer(qwen3, spec(max_tokens=25, sampling=favoured))
    repeated = [max(map(tokens.count, tokens)) for tokens in found.values()]
    assert sum(times > 1 for times in repeated) >= 4


def stopped(one: SequenceSpec, whole: list[int], place: int) -> tuple[SequenceSpec, list[int]]:
    """The same with its token at `place` for its end, and what it answers then."""
    return replace(one, stop_token_ids=frozenset({whole[place]})), whole[: whole.index(whole[place]) + 1]


def test_the_token_behind_one_that_ends_an_answer_is_thrown_away(qwen3: DecoderLM) -> None:
    one, expected = stopped(spec(), answer(qwen3, spec()), 5)
    ahead = engine(qwen3)

    outputs = run(ahead, [one])["a"]

    assert ids(outputs) == expected
    assert outputs[-1].finish is FinishReason.STOP
    assert (work(ahead).discarded_tokens, ahead.forwards) == (1, len(outputs) + 1)
    assert work(ahead).sampled_tokens == len(outputs) == work(ahead).step_s.count
    assert (ahead.has_work, ahead.stats().running, ahead.stats().kv_used) == (False, 0, 0)


@pytest.mark.slow
def test_blocks_of_who_ended_are_given_on_at_once_and_nobody_reads_what_is_written_too_much(
    qwen3: DecoderLM,
) -> None:
    """There are two blocks, and each answer needs both: the last one's, to which a step wrote until then."""
    roomy = [
        spec(str(n), prompt_ids=text) for n, text in enumerate(prompts(5, seed=3, shortest=9, longest=9))
    ]
    made = [stopped(replace(one, max_tokens=7), answer(qwen3, one), 5) for one in roomy]
    ahead = engine(qwen3, num_blocks=2, prefix_cache=False)

    found = run(ahead, [one for one, _ in made])

    assert {key: ids(outputs) for key, outputs in found.items()} == {one.key: end for one, end in made}
    assert work(ahead).discarded_tokens == 5


@pytest.mark.slow
def test_an_answer_that_fills_a_block_with_its_last_token_is_cached_without_what_came_behind(
    qwen3: DecoderLM,
) -> None:
    """Its 16 tokens fill the block and were computed; the 17th was computed ahead and discarded."""
    one, expected = stopped(
        spec(prompt_ids=list(range(8))), answer(qwen3, spec(prompt_ids=list(range(8)))), 8
    )
    assert len(expected) == 9
    ahead = engine(qwen3)
    run(ahead, [one])
    more = spec("more", prompt_ids=[*one.prompt_ids, *expected, 1, 2])

    found = ids(run(ahead, [more])["more"])

    assert work(ahead).discarded_tokens == 1
    assert ahead.stats().cache.hits == 16
    assert found == answer(qwen3, more)


def test_who_is_cancelled_gets_no_token_of_the_step_under_way(qwen3: DecoderLM) -> None:
    wishes = [spec("a"), spec("b", prompt_ids=[9, 8, 7])]
    ahead = engine(qwen3)
    for one in wishes:
        ahead.add(one)
    outputs = [output for _ in range(4) for output in ahead.step()]

    assert ahead.cancel("a")
    behind = ahead.step()

    assert ahead.step_keys == ("b",)
    assert [output.key for output in behind] == ["b"]
    assert ids(o for o in [*outputs, *behind, *left(ahead)] if o.key == "b") == answer(qwen3, wishes[1])
    assert work(ahead).discarded_tokens == 1


def test_a_cancelled_key_that_comes_again_gets_nothing_of_what_was_under_way(qwen3: DecoderLM) -> None:
    ahead, again = engine(qwen3), spec(prompt_ids=[9, 8, 7], sampling=Sampling(temperature=1.0, seed=4))
    ahead.add(spec())
    for _ in range(4):
        ahead.step()

    ahead.cancel("a")
    ahead.add(again)
    first = ahead.step()

    assert len(first) == 1
    assert ids([*first, *left(ahead)]) == answer(qwen3, again)
    assert work(ahead).discarded_tokens == 1


def test_an_engine_whose_last_sequence_is_cancelled_comes_to_rest(qwen3: DecoderLM) -> None:
    ahead = engine(qwen3)
    ahead.add(spec())
    for _ in range(3):
        ahead.step()

    ahead.cancel("a")

    told = [(ahead.has_work, ahead.step(), ahead.step_keys) for _ in range(2)]

    assert told == [(True, [], ()), (False, [], ())]
    assert (ahead.stats().kv_used, ahead.forwards) == (0, 4)


@pytest.mark.slow
def test_who_is_held_gets_no_token_of_the_step_under_way_and_the_same_one_later(qwen3: DecoderLM) -> None:
    wishes = [
        spec("a", sampling=Sampling(temperature=1.2, seed=3)),
        spec("b", prompt_ids=[9, 8, 7], max_tokens=20),
    ]
    ahead = engine(qwen3)
    for one in wishes:
        ahead.add(one)
    outputs = [output for _ in range(4) for output in ahead.step()]

    ahead.hold("a")
    held = [output for _ in range(5) for output in ahead.step()]
    ahead.resume("a")
    outputs += held + left(ahead)

    assert {output.key for output in held} == {"b"}
    assert {one.key: ids(o for o in outputs if o.key == one.key) for one in wishes} == {
        one.key: answer(qwen3, one) for one in wishes
    }
    assert work(ahead).discarded_tokens == 1


def test_who_is_held_and_resumed_between_two_calls_notices_nothing(qwen3: DecoderLM) -> None:
    ahead = engine(qwen3)
    ahead.add(spec())
    outputs = [output for _ in range(4) for output in ahead.step()]

    ahead.hold("a")
    ahead.resume("a")

    assert ids([*outputs, *left(ahead)]) == answer(qwen3, spec())
    assert (work(ahead).ahead, work(ahead).discarded_tokens) == (10, 0)


@pytest.mark.slow
def test_who_arrives_is_let_in_when_the_step_under_way_is_read(qwen3: DecoderLM) -> None:
    ahead, late = engine(qwen3), spec("late", prompt_ids=[1, 2, 3])
    ahead.add(spec(max_tokens=30))
    for _ in range(4):
        ahead.step()

    ahead.add(late)
    told = [(ahead.step(), ahead.step_keys) for _ in range(2)]

    assert [keys for _, keys in told] == [("a",), ("a", "late")]
    assert ids(o for o in [*told[1][0], *left(ahead)] if o.key == "late") == answer(qwen3, late)


def test_keys_and_values_are_handed_on_without_the_token_too_much(qwen3: DecoderLM) -> None:
    one, expected = stopped(spec(), answer(qwen3, spec()), 5)
    one = replace(one, export=KvExport(key="kv", scope="r/1/2"))
    slots, others = Slots(), Slots()
    ahead, plain = (
        engine(qwen3, export_to=slots.allocate),
        engine(qwen3, export_to=others.allocate, capture=None),
    )

    found, meant = run(ahead, [one])["a"], run(plain, [one])["a"]

    assert work(ahead).discarded_tokens == 1
    assert [(o.token_id, o.kv) for o in found] == [(o.token_id, o.kv) for o in meant]
    assert len(found) == len(expected)
    given, wanted = (of.arrays["kv"] for of in (slots, others))
    assert given.shape == wanted.shape
    found_kv, meant_kv = (torch.from_numpy(of.data).view(torch.float32) for of in (given, wanted))
    assert torch.allclose(found_kv, meant_kv, atol=1e-5)


class Late:
    """Pinned memory as a GPU writes it: what is copied there is found when it is waited for."""

    def __init__(self, most: int) -> None:
        self._tokens = torch.empty(most, dtype=torch.int64)

    def begin(self, sent: torch.Tensor) -> Callable[[], list[int]]:
        here = self._tokens[: len(sent)]
        here.copy_(sent)
        return here.tolist


@pytest.mark.slow
def test_tokens_of_two_steps_that_are_under_way_arrive_in_two_places(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_HostBuffer", Late)
    ahead = engine(qwen3)
    ahead._runner._arrivals = runner._Arrivals(6, torch.device("cuda"))
    wishes = [spec("a"), spec("b", prompt_ids=[9, 9, 9], max_tokens=17)]

    found = run(ahead, wishes)

    assert {key: ids(outputs) for key, outputs in found.items()} == {
        one.key: answer(qwen3, one) for one in wishes
    }
    assert work(ahead).ahead > 10


def test_a_profile_has_the_parts_of_each_call_one_behind_the_other(qwen3: DecoderLM, tmp_path: Path) -> None:
    """The second call launches two steps, and the last one none."""
    timeline.set_up(tmp_path, "worker-0")
    try:
        run(engine(qwen3), [spec(max_tokens=4)])
    finally:
        timeline.shut_down()
    [file] = tmp_path.iterdir()
    found = read_events([json.loads(line) for line in file.read_text().splitlines()])

    steps = [one for one in found if one.name == "step"]
    parts = [
        [one.name for one in found if step.since_us <= one.since_us < step.until_us and one is not step]
        for step in steps
    ]
    launch = ["build", "forward"]
    assert parts == [
        ["schedule", *launch, "sample"],
        ["schedule", *launch, *launch, "sample"],
        ["schedule", *launch, "sample"],
        ["schedule", "sample"],
    ]
    assert [step.told for step in steps] == [
        {"rows": 1, "computed": computed, "sampled": 1} for computed in (4, 1, 1, 1)
    ]


# ---- what fails ----------------------------------------------------------------------------------


def test_logits_that_are_no_numbers_fail_their_sequence_only_and_are_fed_to_nobody(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = [spec("a"), spec("b", prompt_ids=[9, 9, 9])]
    ahead = engine(qwen3)
    for one in wishes:
        ahead.add(one)
    outputs = [*ahead.step(), *ahead.step()]
    head, embed, shown = DecoderLM.head, DecoderLM.embed, list[int]()

    def poisoned(self: DecoderLM, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits = head(self, hidden, indices)
        logits[0, 17] = float("nan")
        return logits

    def looked_at(self: DecoderLM, token_ids: torch.Tensor) -> torch.Tensor:
        shown.extend(token_ids.tolist())
        return embed(self, token_ids)

    monkeypatch.setattr(DecoderLM, "embed", looked_at)
    with monkeypatch.context() as patched:
        patched.setattr(DecoderLM, "head", poisoned)
        outputs += ahead.step()  # which launches the one that is poisoned
    with pytest.raises(StepFailedError, match="not numbers for 1 of 2") as caught:
        ahead.step()
    outputs += [*caught.value.outputs, *left(ahead)]

    assert caught.value.keys == ("a",)
    assert ids(o for o in outputs if o.key == "b") == answer(qwen3, wishes[1])
    assert work(ahead).discarded_tokens == 1
    assert min(shown) >= 0


@pytest.mark.slow
def test_a_step_that_cannot_be_launched_fails_behind_the_outputs_of_the_one_before(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = [spec("a"), spec("b", prompt_ids=[9, 9, 9], max_tokens=5), spec("c", prompt_ids=[1, 2])]
    ahead = engine(qwen3, max_sequences=2)
    for one in wishes:
        ahead.add(one)
    outputs = [output for _ in range(3) for output in ahead.step()]

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(DecoderLM, "embed", fail)
        outputs += ahead.step()
    assert [output.step for output in outputs[-2:]] == [4, 4]
    with pytest.raises(StepFailedError, match="engine step 5 failed: RuntimeError: out of luck") as caught:
        ahead.step()
    rest = left(ahead)

    assert caught.value.keys == ("a", "b")
    assert ids(o for o in outputs if o.key == "b") == answer(qwen3, wishes[1])[:4]
    assert ids(rest) == answer(qwen3, wishes[2])
    assert ahead.stats().kv_used == 0


# ---- whatever happens ----------------------------------------------------------------------------

SEEDS = 16


@dataclass(frozen=True)
class Asked:
    """A request, its arrival, and its answer without interruptions."""

    boundary: int
    spec: SequenceSpec
    answer: list[int]


@dataclass
class History:
    """The events at each boundary between two calls."""

    asked: list[Asked]
    sizes: dict[str, Any]
    cancelled: dict[str, int] = field(default_factory=dict)
    held: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        ends = [*self.cancelled.values(), *(until for _, until in self.held.values())]
        return max([one.boundary for one in self.asked] + ends)


@pytest.fixture(scope="module")
def texts(qwen3: DecoderLM) -> list[tuple[SequenceSpec, list[int]]]:
    """Requests and their answers, many of which begin as others do, or with others' answers.

    Beside one in six nothing runs ahead.
    """
    made: list[tuple[SequenceSpec, list[int]]] = []
    random, plain = Random(1), engine(qwen3, capture=None, num_blocks=200)
    for n, text in enumerate(prompts(36, seed=11, longest=16)):
        prompt = text
        if n % 3:
            before, told = random.choice(made)
            prompt = [*before.prompt_ids, *told[: random.randrange(len(told) + 1)], *text[:3]][:40]
        one = spec(
            str(n),
            prompt_ids=prompt,
            max_tokens=random.randrange(1, 36),
            sampling=replace(
                SAMPLINGS[n % len(SAMPLINGS)], seed=n, repetition_penalty=1.3 if n % 12 == 5 else 1.0
            ),
            logprobs=1 if n % 12 == 10 else None,
        )
        made.append((one, ids(run(plain, [one])[one.key])))
    return made


def drawn(seed: int, texts: list[tuple[SequenceSpec, list[int]]]) -> History:
    random = Random(seed)
    block_size = random.choice([2, 4])
    sizes = {
        "block_size": block_size,
        "num_blocks": random.choice([76, 84, 96, 512]) // block_size,
        "max_sequences": random.choice([1, 3, 6, 6]),
        "prefix_cache": random.random() < 0.8,
    }
    asked: list[Asked] = []
    for one, whole in random.sample(texts, 9):
        boundary = random.choice([0, random.randrange(40)])
        wish = replace(one, priority=random.randrange(3), tenant=random.choice("xy"))
        ends = random.random() < 0.6
        asked.append(
            Asked(boundary, *(stopped(wish, whole, random.randrange(len(whole))) if ends else (wish, whole)))
        )
    history = History(asked, sizes)
    for wished in random.sample(asked, 3):
        history.cancelled[wished.spec.key] = wished.boundary + random.randrange(1, 30)
    for wished in random.sample(asked, 3):
        since = wished.boundary + random.randrange(1, 20)
        history.held[wished.spec.key] = since, since + random.randrange(12)
    return history


def lived(of: KVEngine, history: History) -> dict[str, list[Output]]:
    """Return all outputs by key; check that cancelled and held sequences have none."""
    outputs: dict[str, list[Output]] = {one.spec.key: [] for one in history.asked}
    gone, held = set[str](), set[str]()
    for boundary in count():
        for one in history.asked:
            if one.boundary == boundary:
                of.add(one.spec)
        for key, when in history.cancelled.items():
            if when == boundary and of.cancel(key):
                gone.add(key)
        for key, (since, until) in history.held.items():
            if since == boundary and of.hold(key):
                held.add(key)
            if until == boundary:
                of.resume(key)
                held.discard(key)
        if not of.has_work and boundary > history.length:
            return outputs
        told = of.step()
        assert not {*of.step_keys} & (gone | held)
        assert {output.key for output in told} <= {*of.step_keys}
        for output in told:
            outputs[output.key].append(output)
    raise AssertionError


@pytest.mark.slow
def test_tokens_are_the_same_whatever_happens(
    qwen3: DecoderLM, texts: list[tuple[SequenceSpec, list[int]]]
) -> None:
    happened = Counter[str]()
    for seed in range(SEEDS):
        history = drawn(seed, texts)
        ahead = engine(qwen3, **history.sizes)
        plain = engine(qwen3, **history.sizes, runs_ahead=False)

        for of in (ahead, plain):
            found = lived(of, history)
            for one in history.asked:
                answered = tokens(found[one.spec.key])
                came_to, so_far = ids(answered), one.answer[: len(answered)]
                assert came_to == (so_far if one.spec.key in history.cancelled else one.answer), (seed, one)
                assert [output.index for output in answered] == list(range(len(answered)))
                ended = [output.finish is not None for output in answered]
                assert ended == [
                    len(so_far) == len(one.answer) and n + 1 == len(ended) for n in range(len(ended))
                ]
            stats = of.stats()
            assert work(of).sampled_tokens == sum(map(len, found.values()))
            assert (stats.kv_used, stats.running, stats.waiting, of.has_work) == (0, 0, 0, False)
            assert not any(node.computing for node in nodes_of(of))

        assert work(plain).ahead == work(plain).discarded_tokens == 0
        happened["ahead"] += work(ahead).ahead
        happened["thrown away"] += work(ahead).discarded_tokens
        happened["preempted"] += ahead.stats().cache.preemptions
        happened["hit"] += ahead.stats().cache.hits
        happened["forwards"] += ahead.forwards

    assert happened["ahead"] > happened["forwards"] / 4
    assert happened["thrown away"] > SEEDS
    assert happened["preempted"] > SEEDS / 4
    assert happened["hit"] > 8 * SEEDS


def nodes_of(of: KVEngine) -> list[Any]:
    """All that the prefix cache has."""
    cache = of._scheduler.cache
    return [] if cache is None else [*cache._roots.values(), *cache._nodes.values()]
