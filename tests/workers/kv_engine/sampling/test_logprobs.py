"""Log probabilities equal those of the stock model's logits, for any batch and sampling."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM, load
from shared.errors import BugError
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, log_softmax, prompts, run_all, scores, tokens
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import PromptOutput, StepFailedError, TokenScore
from workers.kv_engine.sampling import logprobs
from workers.kv_engine.sequence_spec import FinishReason, Sampling, SequenceSpec

TOLERANCE = 1e-4
"""Other batches round otherwise: the last bits of a float32."""
WILD = Sampling(temperature=1.7, top_k=5, top_p=0.8, seed=3)


def engine(node: DecoderLM, **changes: int) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 300, "block_size": 8, "max_step_tokens": 24, "max_sequences": 8}
    return make_engine(node, **(sizes | changes))


def spec(prompt: list[int], key: str = "a", **changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {"key": key, "prompt_ids": prompt, "max_tokens": 12, "logprobs": 5}
    return SequenceSpec(**(values | changes))


def check(found: Sequence[TokenScore], expected: torch.Tensor, token_ids: list[int], top: int) -> None:
    """Check each score against the rows of `expected` and the token after each."""
    assert [score.token_id for score in found] == token_ids
    for score, row in zip(found, expected, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=TOLERANCE)
        likely = row.topk(top)
        assert [id for id, _ in score.top] == likely.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(likely.values.tolist(), abs=TOLERANCE)


def close(found: Sequence[TokenScore], other: Sequence[TokenScore]) -> bool:
    """Return True if two lists of scores are equal up to rounding."""
    return all(
        (a.token_id, [id for id, _ in a.top]) == (b.token_id, [id for id, _ in b.top])
        and a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
        and [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=TOLERANCE)
        for a, b in zip(found, other, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "llama3_rope"])
@pytest.mark.parametrize("max_step_tokens", [9, 100])
def test_prompt_and_answer_are_scored_as_the_stock_model_scores_them(
    family: Family, max_step_tokens: int
) -> None:
    """Nine tokens a step: a prompt of forty is scored over several steps."""
    [prompt] = prompts(1, seed=2, shortest=40)
    busy = engine(load(tiny_checkpoint(family)), max_step_tokens=max_step_tokens)

    outputs = run_all(busy, [spec(prompt, scores_prompt=True)])["a"]

    text = prompt + ids(outputs)
    check(scores(outputs), log_softmax(family, text)[:-1], text[1:], top=5)
    of_prompt = [output for output in outputs if isinstance(output, PromptOutput)]
    assert outputs[: len(of_prompt)] == of_prompt
    assert len(of_prompt) == -(-40 // max_step_tokens)
    assert {output.finish for output in of_prompt} == {None}


@pytest.mark.parametrize("sampling", [Sampling(), WILD])
def test_a_sampled_tokens_log_probability_is_raw(qwen3: DecoderLM, sampling: Sampling) -> None:
    [prompt] = prompts(1, seed=4)

    outputs = run_all(engine(qwen3), [spec(prompt, sampling=sampling, logprobs=20)])["a"]

    text = prompt + ids(outputs)
    expected = log_softmax("qwen3", text)[len(prompt) - 1 : -1]
    check(scores(outputs), expected, ids(outputs), top=20)
    is_likeliest = [score.token_id == score.top[0][0] for score in scores(outputs)]
    assert all(is_likeliest) is (sampling is not WILD)


@pytest.mark.slow
def test_scores_are_the_same_alone_and_among_31_others_that_ask_for_other_things(qwen3: DecoderLM) -> None:
    texts = prompts(32, seed=7, shortest=2)
    mine = spec(texts[0], "mine", sampling=WILD, scores_prompt=True, logprobs=3)
    others = [
        SequenceSpec(
            key=str(n),
            prompt_ids=text,
            max_tokens=12,
            sampling=replace(WILD, seed=n) if n % 2 else Sampling(),
            logprobs=(None, 0, 20)[n % 3],
            scores_prompt=n % 3 == 2,
        )
        for n, text in enumerate(texts[1:])
    ]

    alone = run_all(engine(qwen3), [mine])["mine"]
    busy = engine(qwen3, max_sequences=32, max_step_tokens=64)
    among = run_all(busy, [*others[:15], mine, *others[15:]])

    assert ids(among["mine"]) == ids(alone)
    assert close(scores(among["mine"]), scores(alone))
    assert {len(score.top) for score in scores(among["mine"])} == {3}
    assert all(output.score is None for output in tokens(among["0"]))
    assert {len(score.top) for score in scores(among["1"])} == {0}
    assert {len(score.top) for score in scores(among["2"])} == {20}
    assert len(scores(among["2"])) == len(texts[3]) - 1 + 12


@pytest.mark.slow
def test_who_asks_changes_no_token(qwen3: DecoderLM) -> None:
    texts = prompts(6, seed=8)

    def answers(**asked: Any) -> dict[str, list[int]]:
        specs = [spec(text, str(n), sampling=WILD, **asked) for n, text in enumerate(texts)]
        return {key: ids(outputs) for key, outputs in run_all(engine(qwen3), specs).items()}

    assert answers(logprobs=20, scores_prompt=True) == answers(logprobs=None)


def test_a_batch_in_which_nobody_asks_computes_no_log_probability(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def spy(*args: Any, **kwargs: Any) -> Callable[[], list[TokenScore]]:
        calls.append(args)
        return logprobs.begin_score(*args, **kwargs)

    monkeypatch.setattr("workers.kv_engine.runner.begin_score", spy)
    run_all(engine(qwen3), [spec(text, str(n), logprobs=None) for n, text in enumerate(prompts(4, seed=1))])
    assert not calls
    run_all(engine(qwen3), [spec([1, 2, 3])])
    assert len(calls) == 12


def test_the_head_of_a_prompt_is_computed_in_slices(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of seven rows of logits: a prompt of forty takes six slices, with the same result."""
    [prompt] = prompts(1, seed=2, shortest=40)
    whole = run_all(engine(qwen3, max_step_tokens=100), [spec(prompt, scores_prompt=True)])["a"]
    heights: list[int] = []
    head = DecoderLM.head

    def spy(self: DecoderLM, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        heights.append(len(indices))
        return head(self, hidden, indices)

    monkeypatch.setattr(DecoderLM, "head", spy)
    monkeypatch.setattr(logprobs, "_SLICE_FLOATS", 7 * qwen3.vocab_size)

    sliced = run_all(engine(qwen3, max_step_tokens=100), [spec(prompt, scores_prompt=True)])["a"]

    assert heights[-18:-12] == [7, 7, 7, 7, 7, 4]
    assert heights[-12:] == [1] * 12
    assert close(scores(sliced), scores(whole))


@pytest.mark.parametrize("length", [2, 24, 25, 26])
def test_a_prompt_can_be_scored_without_an_answer(qwen3: DecoderLM, length: int) -> None:
    [prompt] = prompts(1, seed=9, shortest=length, longest=length)
    busy = engine(qwen3)

    outputs = run_all(busy, [spec(prompt, max_tokens=0, scores_prompt=True)])["a"]

    assert not tokens(outputs)
    check(scores(outputs), log_softmax("qwen3", prompt)[:-1], prompt[1:], top=5)
    assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    assert busy.stats().kv_used == 0


def test_a_prompt_as_long_as_the_context_can_be_scored(qwen3: DecoderLM) -> None:
    [prompt] = prompts(1, seed=9, shortest=512, longest=512)

    outputs = run_all(
        engine(qwen3, max_step_tokens=100), [spec(prompt, max_tokens=0, scores_prompt=True, logprobs=0)]
    )["a"]

    assert len(scores(outputs)) == 511


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_behind_a_prefix_the_scores_go_on(qwen3: DecoderLM, cut: int) -> None:
    whole = run_all(engine(qwen3), [spec([5, 6, 7], sampling=WILD)])["a"]

    rest = run_all(engine(qwen3), [spec([5, 6, 7], sampling=WILD, prefix_ids=ids(whole)[:cut])])["a"]

    assert close(scores(rest), scores(whole)[cut:])


def test_a_prompt_is_scored_once_also_behind_a_prefix(qwen3: DecoderLM) -> None:
    outputs = run_all(engine(qwen3), [spec([5, 6, 7], prefix_ids=[1, 2], scores_prompt=True)])["a"]

    assert [score.token_id for score in scores(outputs)] == [6, 7, *ids(outputs)]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2])
def test_logits_of_a_prompt_that_are_no_numbers_fail_their_sequence_only(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    requests = [
        spec([5, 6, 7, 8], "a", scores_prompt=True),
        spec([9, 9, 9], "b", scores_prompt=True),
    ]
    expected = run_all(engine(qwen3), requests[1:])["b"]
    busy = engine(qwen3)
    for request in requests:
        busy.add(request)
    head = DecoderLM.head

    def poisoned(self: DecoderLM, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits = head(self, hidden, indices)
        if len(indices) == 5:  # those of the prompts
            logits[place, 17] = float("nan")
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(DecoderLM, "head", poisoned)
        with pytest.raises(StepFailedError, match="not numbers for 1 of 2") as caught:
            busy.step()
    answer = caught.value.outputs
    while busy.has_work:
        answer += busy.step()

    assert caught.value.keys == ("a",)
    assert {output.key for output in answer} == {"b"}
    assert close(scores(answer), scores(expected))


def test_a_prompt_is_not_scored_without_saying_how_many_likeliest(qwen3: DecoderLM) -> None:
    with pytest.raises(BugError, match="but no logprobs"):
        engine(qwen3).add(spec([1, 2], logprobs=None, scores_prompt=True))


# ---- the computation itself ------------------------------------------------------------------------


def score(logits: torch.Tensor, token_ids: list[int], top: int) -> list[TokenScore]:
    rows = torch.arange(len(token_ids))
    return logprobs.score(
        lambda at: logits.index_select(0, at),
        rows,
        torch.tensor(token_ids),
        top=top,
        vocab_size=logits.shape[-1],
    )


def test_of_equal_logits_the_lower_id_is_the_likelier() -> None:
    logits = torch.tensor([[-3.0, 2.0, -1.0, 2.0, -1.0, 2.0, -3.0]])

    [found] = score(logits, [2], top=6)

    assert [id for id, _ in found.top] == [1, 3, 5, 2, 4, 0]
    assert found.top[0][0] == int(logits.argmax())
    assert found.logprob == found.top[3][1]


def test_the_order_of_floats_of_every_sign_and_size_is_kept() -> None:
    torch.manual_seed(5)
    logits = torch.randn(50, 40) * torch.logspace(-20, 20, 50)[:, None]

    found = score(logits, [0] * 50, top=40)

    order = torch.tensor([[id for id, _ in told.top] for told in found])
    assert (logits.gather(-1, order).diff(dim=-1) <= 0).all()


def test_no_more_are_likely_than_there_are_tokens() -> None:
    [found] = score(torch.zeros(1, 3), [1], top=20)

    assert [id for id, _ in found.top] == [0, 1, 2]


def test_a_token_that_cannot_come_has_no_share() -> None:
    [found] = score(torch.tensor([[0.0, float("-inf")]]), [1], top=2)

    assert found.logprob == float("-inf")
    assert found.top == ((0, 0.0), (1, float("-inf")))
