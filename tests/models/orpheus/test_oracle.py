"""The tokens are those of transformers' `generate`, to the end of the speech."""

import pytest

from models.orpheus.nodes import load
from models.orpheus.processing import STOP
from models.transformers_lm.node import DecoderLM
from tests.models.orpheus.oracle import generate, prompt
from tests.tiny.orpheus import END_AUDIO, FIRST_AUDIO, tiny_orpheus
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec

pytestmark = pytest.mark.slow


TEXTS = [
    ("tara", "hello there"),
    ("leo", "one two three"),
    ("zoe", "what?"),
    ("dan", "good morning to everybody"),
    ("mia", "x"),
]
MAX_TOKENS = 60


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_concurrent_speeches_equal_those_of_generate(penalty: float) -> None:
    node = load(tiny_orpheus(), "LLM")
    assert isinstance(node, DecoderLM)
    asked = [prompt(*text) for text in TEXTS]
    answered = [(prompt_ids, *generate(prompt_ids, MAX_TOKENS, penalty=penalty)) for prompt_ids in asked]
    clear = [(prompt_ids, answer) for prompt_ids, answer, margin in answered if margin > 1e-4]
    engine = make_engine(node, num_blocks=128, block_size=8, max_step_tokens=9, max_sequences=4)

    found = run(
        engine,
        [
            SequenceSpec(
                key=str(index),
                prompt_ids=prompt_ids,
                max_tokens=MAX_TOKENS,
                eos_ids=frozenset({STOP}),
                sampling=Sampling(repetition_penalty=penalty),
            )
            for index, (prompt_ids, _) in enumerate(clear)
        ],
        every=3,
    )

    answers = [answer for _, answer in clear]
    assert [ids(found[str(index)]) for index in range(len(clear))] == answers
    # The compared answers are audio tokens, and they all differ.
    assert len(clear) >= 4
    said = [token for answer in answers for token in answer if token != STOP]
    assert all(FIRST_AUDIO <= token < END_AUDIO for token in said)
    assert len(set(said)) > 100
    assert {answer[-1] == STOP for answer in answers} == {True, False}
