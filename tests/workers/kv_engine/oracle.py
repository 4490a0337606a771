"""The oracle: the answers of transformers' own `generate`, and the certainty of each token."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import Family, tiny_checkpoint
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, PromptOutput, TokenOutput, TokenScore
from workers.kv_engine.sequence_spec import SequenceSpec


@cache
def _stock_model(family: Family) -> Any:
    """Load the model by transformers itself, from the folder."""
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=torch.float32).eval()


class TieError(Exception):
    """Two tokens are equally likely up to rounding."""


def generate(family: Family, prompt: list[int], max_tokens: int, **settings: Any) -> list[int]:
    """Return the greedy answer. Each of its tokens must be a clear choice, or equality would be chance.

    `settings` are arguments of `generate`: logits processors, and stopping criteria.
    """
    result = _stock_model(family).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **{"eos_token_id": None, **settings},
    )
    for step in result.scores:
        best, second = step[0].topk(2).values.tolist()
        if best - second <= 1e-4:
            raise TieError("the prompt leads to a tie: choose another")
    return [int(token) for token in result.sequences[0, len(prompt) :]]


@cache
def clear_text(family: Family, length: int, max_tokens: int) -> tuple[list[int], list[int]]:
    """Return a random prompt of that length whose answer has no tie, and the answer."""
    for seed in range(10):
        [text] = prompts(1, seed=seed, shortest=length, longest=length)
        try:
            return text, generate(family, text, max_tokens)
        except TieError:
            continue
    raise TieError(f"ten prompts of {length} tokens led {family} to ties")


def log_softmax(family: Family, ids: list[int]) -> torch.Tensor:
    """Return the log probabilities of the stock model after each of `ids`: (T, vocab)."""
    with torch.inference_mode():
        logits: torch.Tensor = _stock_model(family)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def prompts(count: int, *, seed: int, shortest: int = 1, longest: int = 40) -> list[list[int]]:
    """Return random prompts of mixed lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 500, random.integers(shortest, longest + 1)).tolist() for _ in range(count)]


def run(engine: KVEngine, specs: list[SequenceSpec], *, every: int = 0) -> dict[str, list[TokenOutput]]:
    """Return all generated tokens by key; one sequence arrives in each `every` steps."""
    return {key: tokens(outputs) for key, outputs in run_all(engine, specs, every=every).items()}


def run_all(engine: KVEngine, specs: list[SequenceSpec], *, every: int = 0) -> dict[str, list[Output]]:
    """Return all outputs by key."""
    outputs: dict[str, list[Output]] = {spec.key: [] for spec in specs}
    waiting = list(specs)
    steps = 0
    while waiting or engine.has_work:
        while waiting and (not every or steps % every == 0):
            engine.add(waiting.pop(0))
            if every:
                break
        for output in engine.step():
            outputs[output.key].append(output)
        steps += 1
    return outputs


def tokens(outputs: Iterable[Output]) -> list[TokenOutput]:
    return [output for output in outputs if isinstance(output, TokenOutput)]


def scores(outputs: Iterable[Output]) -> list[TokenScore]:
    """Return the scores of the prompt, then of the answer."""
    found: list[TokenScore] = []
    for output in outputs:
        if isinstance(output, PromptOutput):
            found += output.scores
        elif isinstance(output, TokenOutput) and output.score is not None:
            found.append(output.score)
    return found


def ids(outputs: Iterable[Output]) -> list[int]:
    return [output.token_id for output in tokens(outputs)]
