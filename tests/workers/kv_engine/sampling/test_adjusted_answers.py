"""Greedy answers under penalties, biases and bans are those of `generate` with the same settings.

The texts arrive one by one and are chunked, in batches with other settings and with none.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from models.decoder_lm.nodes import DecoderLM, load
from shared.errors import ClientError
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import clear_text, generate, ids, run, run_all, scores, tokens
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import FinishReason, Sampling, SequenceSpec

NEW_TOKENS = 24
LENGTH = 20


class OpenAIPenalties(LogitsProcessor):  # type: ignore[misc] # transformers tells no types
    """Presence and frequency as OpenAI's formula has them; transformers has none."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, LENGTH:], minlength=scores.shape[-1])
        return scores - self.presence * (counts > 0) - self.frequency * counts


Wish = tuple[Sampling, dict[str, Any], frozenset[int]]
"""The same to us and to `generate`, and the tokens that end the answer."""


def wish(name: str, plain: list[int]) -> Wish:
    """A wish that changes the plain answer."""
    often = max(set(plain), key=plain.count)
    end = frozenset([plain[3]])
    none = frozenset[int]()
    wishes: Mapping[str, Wish] = {
        "repetition": (Sampling(repetition_penalty=1.8), {"repetition_penalty": 1.8}, none),
        "reward": (Sampling(repetition_penalty=0.6), {"repetition_penalty": 0.6}, none),
        "presence": (
            Sampling(presence_penalty=2.0), {"logits_processor": [OpenAIPenalties(2.0, 0.0)]}, none
        ),
        "frequency": (
            Sampling(frequency_penalty=1.5), {"logits_processor": [OpenAIPenalties(0.0, 1.5)]}, none
        ),
        "bias": (
            Sampling(logit_bias=[(often, -100.0), (17, 4.0)]),
            {"sequence_bias": [[[often], -100.0], [[17], 4.0]]},
            none,
        ),
        "bad words": (
            Sampling(bad_words=[[often], plain[1:3], plain[:4]]),
            {"bad_words_ids": [[often], plain[1:3], plain[:4]]},
            none,
        ),
        "allowed": (
            Sampling(allowed_token_ids=[one for one in range(512) if one % 3 and one != often]),
            {"suppress_tokens": [one for one in range(512) if not one % 3 or one == often]},
            none,
        ),
        "min tokens": (Sampling(min_tokens=10), {"min_new_tokens": 10, "eos_token_id": plain[3]}, end),
        "stop": (Sampling(), {"eos_token_id": plain[3]}, end),
        "all": (
            Sampling(
                logit_bias=[(17, 4.0)],
                repetition_penalty=1.3,
                presence_penalty=0.5,
                frequency_penalty=0.5,
                bad_words=[[often], plain[1:3]],
                min_tokens=10,
            ),
            {
                "sequence_bias": [[[17], 4.0]],
                "repetition_penalty": 1.3,
                "bad_words_ids": [[often], plain[1:3]],
                "min_new_tokens": 10,
                "eos_token_id": plain[3],
                "logits_processor": [OpenAIPenalties(0.5, 0.5)],
            },
            end,
        ),
    }  # fmt: skip
    return wishes[name]


CASES = (
    "repetition", "reward", "presence", "frequency", "bias", "bad words", "allowed", "min tokens", "stop",
    "all",
)  # fmt: skip


@cache
def node_of(family: Family) -> DecoderLM:
    return load(tiny_checkpoint(family))


def engine_of(family: Family, rows: int = 4) -> KVEngine:
    return make_engine(node_of(family), num_blocks=64, block_size=8, max_step_tokens=9, max_sequences=rows)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("name", CASES)
def test_a_wish_is_answered_as_generate_does(family: Family, name: str) -> None:
    text, plain = clear_text(family, LENGTH, NEW_TOKENS)
    sampling, settings, stops = wish(name, plain)
    expected = generate(family, text, NEW_TOKENS, **settings)
    asked = SequenceSpec(
        key="asked", prompt_ids=text, max_tokens=NEW_TOKENS, sampling=sampling, stop_token_ids=stops
    )
    beside = SequenceSpec(key="plain", prompt_ids=text, max_tokens=NEW_TOKENS)
    other = replace(asked, key="other", prompt_ids=text[::-1], sampling=Sampling(repetition_penalty=1.1))

    found = run(engine_of(family), [beside, asked, other], every=2)

    assert ids(found["asked"]) == expected != plain
    assert ids(found["plain"]) == plain
    is_stopped = expected[-1] in stops
    assert found["asked"][-1].finish is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_decay_of_the_length_ends_an_answer_as_generate_does(family: Family) -> None:
    text, plain = clear_text(family, LENGTH, NEW_TOKENS)
    end = min(set(range(5, 99)) - set(plain))

    def asked(start: int, **changes: Any) -> SequenceSpec:
        how = Sampling(length_decay=(start, 1.2), repetition_penalty=1.1)
        spec = SequenceSpec(
            key="a", prompt_ids=text, max_tokens=NEW_TOKENS, sampling=how, eos_ids=frozenset([end])
        )
        return replace(spec, **changes)

    answers = []
    for start in range(8):
        wanted = {"exponential_decay_length_penalty": (start, 1.2), "repetition_penalty": 1.1}
        expected = generate(family, text, NEW_TOKENS, eos_token_id=end, **wanted)
        assert ids(run(engine_of(family), [asked(start)])["a"]) == expected
        assert ids(run(engine_of(family), [asked(start, prefix_ids=expected[:3])])["a"]) == expected[3:]
        answers.append(expected)

    lengths = [len(answer) for answer in answers]
    assert lengths == sorted(lengths)
    assert len({*lengths}) > 1, "a start that is off by one would be seen"
    assert lengths[0] < NEW_TOKENS
    assert end not in ids(run(engine_of(family), [asked(0, ignore_eos=True)])["a"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("released", [1, 9, 20])
def test_a_resumed_answer_continues_as_if_nothing_had_happened(name: str, released: int) -> None:
    text, plain = clear_text("qwen3", LENGTH, NEW_TOKENS)
    sampling, _, stops = wish(name, plain)
    for how in (sampling, replace(sampling, temperature=1.2, top_p=0.9, min_p=0.01, seed=3)):
        spec = SequenceSpec(
            key="a", prompt_ids=text, max_tokens=NEW_TOKENS, sampling=how, stop_token_ids=stops
        )
        whole = ids(run(engine_of("qwen3"), [spec])["a"])
        prefix = whole[: min(released, len(whole) - 1)]

        found = run(engine_of("qwen3"), [replace(spec, prefix_ids=prefix)])

        assert prefix + ids(found["a"]) == whole


@pytest.mark.slow
def test_the_same_request_alone_and_among_31_others_gives_the_same_tokens(qwen3: DecoderLM) -> None:
    text, plain = clear_text("qwen3", LENGTH, NEW_TOKENS)

    def spec(number: int) -> SequenceSpec:
        sampling, _, stops = wish(CASES[number % len(CASES)], plain)
        how = replace(
            sampling,
            temperature=(0.0, 0.8, 1.5)[number % 3],
            top_p=(1.0, 0.9)[number % 2],
            top_k=(0, 30, 7)[number % 3],
            min_p=(0.0, 0.02)[number // 2 % 2],
            seed=number,
        )
        return SequenceSpec(
            key=str(number),
            prompt_ids=[*text, number],
            max_tokens=NEW_TOKENS,
            sampling=how,
            stop_token_ids=stops,
        )

    specs = [spec(number) for number in range(32)]

    def engine() -> KVEngine:
        return make_engine(qwen3, num_blocks=256, block_size=8, max_step_tokens=64, max_sequences=32)

    together = run(engine(), specs)

    for one in specs[::3]:
        assert ids(run(engine(), [one])[one.key]) == ids(together[one.key])
    assert len({tuple(ids(found)) for found in together.values()}) > 25


def test_log_probabilities_stay_those_of_the_model(qwen3: DecoderLM) -> None:
    text, plain = clear_text("qwen3", LENGTH, NEW_TOKENS)
    spec = SequenceSpec(key="a", prompt_ids=text, max_tokens=1, logprobs=2)
    banned = replace(spec, sampling=Sampling(bad_words=[[plain[0]]], repetition_penalty=2.0))

    def engine() -> KVEngine:
        return make_engine(qwen3, num_blocks=64, block_size=8, max_step_tokens=64, max_sequences=1)

    [likeliest] = scores(run_all(engine(), [spec])["a"])
    [found] = scores(run_all(engine(), [banned])["a"])

    assert likeliest.token_id == plain[0] != found.token_id
    assert found.top == likeliest.top
    assert found.logprob < likeliest.logprob


def test_a_stop_token_ends_an_answer_that_ignores_its_own_end(qwen3: DecoderLM) -> None:
    text, plain = clear_text("qwen3", LENGTH, NEW_TOKENS)
    spec = SequenceSpec(
        key="a",
        prompt_ids=text,
        max_tokens=NEW_TOKENS,
        eos_ids=frozenset(plain[:2]),
        ignore_eos=True,
        stop_token_ids=frozenset([plain[5]]),
    )
    engine = make_engine(qwen3, num_blocks=64, block_size=8, max_step_tokens=64, max_sequences=1)

    found = tokens(run(engine, [spec])["a"])

    assert [output.token_id for output in found] == plain[: plain.index(plain[5]) + 1]
    assert found[-1].finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"sampling": Sampling(logit_bias=[(10**6, 1.0)])}, "logit_bias: token ids must be from 0 to"),
        ({"sampling": Sampling(bad_words=[[1, 10**6]])}, "bad_words: token ids must be from 0 to"),
        ({"sampling": Sampling(allowed_token_ids=[10**6])}, "allowed_token_ids: token ids must be from 0 to"),
        ({"stop_token_ids": frozenset([-1])}, "stop_token_ids: token ids must be from 0 to"),
        ({"sampling": Sampling(bad_words=[[n] for n in range(512)])}, "leave no token to choose"),
    ],
)
def test_what_no_token_can_mean_is_refused_and_breaks_nothing(
    qwen3: DecoderLM, spec: dict[str, Any], said: str
) -> None:
    engine = make_engine(qwen3, num_blocks=64, block_size=8, max_step_tokens=64, max_sequences=1)

    with pytest.raises(ClientError, match=said):
        engine.add(SequenceSpec(key="a", prompt_ids=[1], max_tokens=2, **spec))

    assert not engine.has_work
