"""A thinker's states feed a talker in the engine: what it says is what transformers says."""

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch

from models.transformers_lm.loader import load_decoder
from shared.errors import BugError
from tests.tiny import talk, tiny_checkpoint
from tests.tiny.talking.graph import CODEC_END
from tests.tiny.talking.nodes import Talker, Thinker, load
from tests.tiny.talking.processing import END, prompt_of, spoken_prompt_of
from tests.workers.kv_engine.engines import make_engine
from workers.data_plane.arrays import borrowed, to_array
from workers.data_plane.port import Array
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, StateOutput, TokenOutput
from workers.kv_engine.sequence_spec import Feed, Sampling, SequenceSpec

TOKENS, FRAMES = talk.TOKENS, talk.FRAMES
TEXTS = talk.TEXTS


@cache
def node(name: str) -> Thinker | Talker:
    found = load(talk.tiny_talker(), name)
    assert isinstance(found, Thinker | Talker)
    return found


def engine(name: str, **options: int) -> KVEngine:
    sizes = {"num_blocks": 40, "block_size": 8, "max_step_tokens": 24, "max_sequences": 8}
    return make_engine(node(name), **(sizes | options))


@dataclass
class Said:
    """The outputs of an engine for one sequence."""

    tokens: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    codes: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False

    def take(self, output: Output) -> None:
        if isinstance(output, StateOutput):
            self.states.append(borrowed(output.values["states"]).clone())
            return
        assert isinstance(output, TokenOutput)
        self.tokens.append(output.token_id)
        if output.values and output.token_id != CODEC_END:
            self.codes.append(borrowed(output.values["codes"]).clone())
        self.ended = output.finish is not None


def drain(of: KVEngine, said: dict[str, Said]) -> None:
    while of.has_work:
        for output in of.step():
            said[output.key].take(output)


def thought(text: str, **spec: object) -> SequenceSpec:
    wanted = {"max_tokens": TOKENS, "sends": frozenset({"states"}), "eos_ids": frozenset({END})}
    return SequenceSpec(key=text, prompt_ids=prompt_of(text), **(wanted | spec))  # type: ignore[arg-type]


def talked(text: str, states: torch.Tensor, *, ended: bool = False, **feed: object) -> SequenceSpec:
    """A talker's sequence, of the states of the prompt and of one token."""
    return SequenceSpec(
        key=text,
        prompt_ids=spoken_prompt_of(prompt_of(text)),
        max_tokens=FRAMES,
        stop_token_ids=frozenset({CODEC_END}),
        feed=Feed(items=to_array(states[: len(prompt_of(text)) + 1]), ended=ended, **feed),  # type: ignore[arg-type]
    )


def oracle(text: str) -> talk.Spoken:
    return talk.spoken(tuple(prompt_of(text)), tokens=TOKENS, frames=FRAMES)


@cache
def states_of(text: str) -> torch.Tensor:
    """The states of the tokens of a prompt and of its answer, alone: (P + T - 1, 2, hidden)."""
    said, thinker = {text: Said()}, engine("thinker")
    thinker.add(thought(text))
    drain(thinker, said)
    assert said[text].tokens == oracle(text).token_ids
    return torch.cat(said[text].states)


def items(text: str, start: int, stop: int | None = None) -> Array:
    first = len(prompt_of(text)) + 1
    found = states_of(text)[first + start : None if stop is None else first + stop]
    return to_array(found.clone())


def test_every_talker_says_what_transformers_says_with_its_items_in_any_pieces() -> None:
    said, talker = {text: Said() for text in TEXTS}, engine("talker")
    for text in TEXTS:
        talker.add(talked(text, states_of(text)))
    drain(talker, said)
    assert [len(one.tokens) for one in said.values()] == [1] * len(TEXTS), "each waits for its second item"
    assert talker.stats().held == len(TEXTS)

    for round_ in range(TOKENS):
        for number, text in enumerate(TEXTS):
            if round_ % (number + 1) == 0:  # unequal paces: the others go on
                start = sum(r % (number + 1) == 0 for r in range(round_))
                one = items(text, start, start + 1)
                talker.feed(text, one if one.shape[0] else None, ended=not one.shape[0])
        drain(talker, said)
    for text in TEXTS:
        fed = sum(r % (TEXTS.index(text) + 1) == 0 for r in range(TOKENS))
        talker.feed(text, items(text, fed), ended=True)
    drain(talker, said)

    for text in TEXTS:
        assert said[text].ended
        torch.testing.assert_close(torch.cat(said[text].codes).long(), oracle(text).codes)
    assert len({tuple(one.tokens) for one in said.values()}) == len(TEXTS), (
        "the control: each says something else"
    )


def test_a_repetition_penalty_counts_what_was_said_and_not_the_ids_of_the_prompt() -> None:
    text = TEXTS[0]
    sampling = Sampling(temperature=0.0, repetition_penalty=1.3)
    spec = replace(talked(text, states_of(text), ended=True), sampling=sampling)
    beyond = [5000 + one for one in spec.prompt_ids]  # of a vocabulary larger than the talker's
    specs = {
        "own": spec,
        "beyond": replace(spec, prompt_ids=beyond),
        "plain": replace(spec, sampling=Sampling()),
    }
    said = {key: Said() for key in specs}
    talker = engine("talker")
    for key, one in specs.items():
        talker.add(replace(one, key=key))
    drain(talker, said)
    assert said["own"].tokens == said["beyond"].tokens != said["plain"].tokens


def test_states_are_sent_once_whatever_the_steps_are_cut_into_and_whatever_is_cached() -> None:
    said, thinker = (
        {text: Said() for text in TEXTS},
        engine("thinker", num_blocks=7, block_size=4, max_step_tokens=8),
    )
    for text in TEXTS:
        thinker.add(thought(text))
    drain(thinker, said)
    assert thinker.stats().cache.preemptions, "so many do not fit at once"
    for text in TEXTS:
        found = torch.cat(said[text].states)
        torch.testing.assert_close(found, states_of(text), atol=1e-4, rtol=1e-4)


def test_a_resumed_text_sends_the_states_of_its_released_tokens_again() -> None:
    text = TEXTS[1]
    tokens = oracle(text).token_ids
    said, thinker = {text: Said()}, engine("thinker")
    thinker.add(thought(text, prefix_ids=tokens[:4]))
    drain(thinker, said)
    whole = torch.cat(said.pop(text).states)

    again = {"all": Said()}
    ids = [*prompt_of(text), *tokens[:-1]]
    spec = SequenceSpec(key="all", prompt_ids=ids, max_tokens=0, sends=frozenset({"states"}))
    thinker.add(spec)
    outputs = [output for _ in range(3) for output in thinker.step()]
    for output in outputs[:-1]:
        again["all"].take(output)

    torch.testing.assert_close(whole, states_of(text), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(again["all"].states), whole, atol=1e-4, rtol=1e-4)
    assert outputs[-1].finish is not None


def test_a_preempted_talker_goes_on_with_the_rows_it_had() -> None:
    said, talker = {text: Said() for text in TEXTS}, engine("talker", num_blocks=10, block_size=4)
    for text in TEXTS:
        talker.add(talked(text, states_of(text)))
        talker.feed(text, items(text, 0), ended=True)
    drain(talker, said)
    assert talker.stats().cache.preemptions
    assert [torch.cat(said[text].codes).tolist() for text in TEXTS] == [
        oracle(text).codes.tolist() for text in TEXTS
    ]
    assert talker.stats().cache.hits == 0, "equal ids of prompts are not equal inputs"


def test_a_sequence_is_held_for_each_of_its_reasons() -> None:
    text = TEXTS[2]
    said, talker = {text: Said()}, engine("talker")
    talker.add(talked(text, states_of(text)))
    drain(talker, said)
    talker.hold(text)
    talker.feed(text, items(text, 0, 2), ended=False)
    assert not talker.has_work
    talker.resume(text)
    drain(talker, said)
    assert len(said[text].tokens) == 3
    talker.hold(text)
    talker.resume(text)
    assert not talker.has_work, "its item has not come"
    assert talker.cancel(text)
    assert not talker.feed(text, None, ended=True)


def test_inner_choices_are_drawn_by_the_seed_of_the_request() -> None:
    text, found = TEXTS[2], list[list[int]]()
    for seed, others in ((1, ()), (1, TEXTS[:2]), (2, ())):
        said, talker = {one: Said() for one in (text, *others)}, engine("talker")
        for one in (*others, text):
            sampling = Sampling(temperature=1.0, top_k=20, seed=seed if one == text else 9)
            talker.add(talked(one, states_of(one), sampling=sampling))
            talker.feed(one, items(one, 0), ended=True)
        drain(talker, said)
        found.append(torch.cat(said[text].codes).tolist())
    assert found[0] == found[1], "whatever else is in the batch"
    assert found[0] != found[2], "another seed draws other codes"


def test_what_cannot_be_fed_fails_alone() -> None:
    talker, text = engine("talker"), TEXTS[0]
    prefix = SequenceSpec(key="x", prompt_ids=[1, 2], prefix_ids=[3], max_tokens=4)
    with pytest.raises(BugError, match="begin with its prompt"):
        talker.add(prefix)
    wrong = np.zeros(3, np.uint8)
    with pytest.raises(Exception, match="items of the stream to 'hi' cannot be read"):
        talker.add(
            SequenceSpec(
                key=text,
                prompt_ids=spoken_prompt_of(prompt_of(text)),
                max_tokens=2,
                feed=Feed(items=Array(dtype="float32", shape=(9, 2, 32), data=wrong)),
            )
        )
    assert not talker.has_work


def test_a_node_that_is_no_end_of_a_stream_says_what_it_lacks() -> None:
    plain = make_engine(
        load_decoder(tiny_checkpoint("qwen3"), "llm"),
        num_blocks=8,
        block_size=8,
        max_step_tokens=8,
        max_sequences=2,
    )
    with pytest.raises(BugError, match=r"'llm' is to stream .'states'., but has neither forward_with_states"):
        plain.add(SequenceSpec(key="a", prompt_ids=[1, 2], max_tokens=2, sends=frozenset({"states"})))
    with pytest.raises(BugError, match="'llm' takes a stream, but has no prompt_rows"):
        plain.add(SequenceSpec(key="a", prompt_ids=[1, 2], max_tokens=2, feed=Feed(ended=False)))
    assert not plain.has_work
