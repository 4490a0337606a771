"""The tokens are those of transformers' `generate`, to the end of the speech."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.events import Inputs, Params
from shared.models.orpheus import processing
from shared.models.orpheus.nodes import load
from shared.models.orpheus.processing import STOP
from shared.models.transformers_lm.node import DecoderLM
from shared.tensors import read_ids
from tests.tiny.orpheus import END_AUDIO, FIRST_AUDIO, tiny_orpheus
from tests.workers.engine.oracle import ids, run
from workers.engine.kv_engine import KVEngine
from workers.engine.sequence import Sampling, SequenceSpec

TEXTS = [
    ("tara", "hello there"),
    ("leo", "one two three"),
    ("zoe", "what?"),
    ("dan", "good morning to everybody"),
    ("mia", "x"),
    ("jess", "the quick brown fox"),
]
MAX_TOKENS = 100


def prompt(voice: str, text: str) -> list[int]:
    prepare = processing.load(tiny_orpheus(), max_seq_len=4096)
    inputs = Inputs(text=text, output_modalities=["audio"])
    result = prepare.run("prepare", "k", {}, {"inputs": inputs, "params": Params(voice=voice)})
    return read_ids(result.outputs["token_ids"])


@cache
def _stock_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_orpheus(), dtype=torch.float32).eval()


def generate(prompt_ids: list[int], penalty: float) -> tuple[list[int], float]:
    """The greedy answer, and by how much the closest choice in it was made."""
    result = _stock_model().generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        top_p=None,
        repetition_penalty=penalty,
        eos_token_id=STOP,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([step[0].topk(2).values for step in result.scores])
    answer = [int(token) for token in result.sequences[0, len(prompt_ids) :]]
    return answer, float((best[:, 0] - best[:, 1]).min())


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_speeches_that_are_said_together_are_each_as_generate_says_them(penalty: float) -> None:
    node = load(tiny_orpheus(), "LLM")
    assert isinstance(node, DecoderLM)
    prompts = [prompt(*text) for text in TEXTS]
    clear = [(text, answer) for text in prompts for answer, by in [generate(text, penalty)] if by > 1e-4]
    engine = KVEngine(node, num_blocks=128, block_size=8, max_step_tokens=9, max_rows=4)

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
    # What is compared is speech, and no one's is another's.
    assert len(clear) >= 4
    said = [token for answer in answers for token in answer if token != STOP]
    assert all(FIRST_AUDIO <= token < END_AUDIO for token in said)
    assert len(set(said)) > 100
    assert {answer[-1] == STOP for answer in answers} == {True, False}
