"""Blocks are refined token by token as published samplers do it: recorded outputs, and the schedules.

`recorded.json` was made once on the tiny checkpoints of `tests.tiny.block_diffusion`, with the mask's logit
cut off: without editing by LLaDA2's own `modeling_llada2_moe.py` (`generate`, its draw replaced by the
argmax, as in LLaDA2.1); with editing by diffusers 0.42.1's `LLaDA2Pipeline` over block-causal logits; for
bd3lm by dllm's `BD3LMSampler` of April 2026.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from models.block_diffusion.driver import BlockDriver
from models.block_diffusion.nodes import load, recipe_of
from models.block_diffusion.options import BlockDiffusionOptions
from models.diffusion_text.node import DiffusionLM
from models.diffusion_text.schedule import even, linear
from models.programs import NewTokens, TokenRequest
from models.sequence_request import SamplingParams
from shared.errors import ClientError
from tests.models.block_diffusion.naive import NaiveRun, answer
from tests.tiny.block_diffusion import BLOCK, tiny_bd3lm, tiny_llada2

RECORDED: Final = json.loads((Path(__file__).parent / "recorded.json").read_text())
CASES: Final = [(kind, case) for kind, cases in RECORDED.items() for case in cases]
NAMES: Final = [f"{kind}: {case['name']}" for kind, case in CASES]
FOLDERS: Final = {"llada2": tiny_llada2, "bd3lm": tiny_bd3lm}


@cache
def node(kind: str) -> DiffusionLM:
    return load(FOLDERS[kind]())


def request_of(case: dict[str, Any], **changes: Any) -> TokenRequest:
    fields = {
        "prompt_ids": case["prompt"],
        "prefix_ids": [],
        "max_tokens": case["max_tokens"],
        "end_ids": frozenset([] if case["end"] is None else [case["end"]]),
        "sampling": SamplingParams(),
        "options": {},
        "seed": 0,
        "choice": 0,
    }
    return TokenRequest(**(fields | changes))


def options_of(case: dict[str, Any]) -> BlockDiffusionOptions:
    return BlockDiffusionOptions(
        steps=case["steps"],
        confidence_threshold=case.get("threshold"),
        parallel_decoding=case.get("threshold") is not None,
        guidance_scale=case.get("guidance_scale", 0.0),
        editing_threshold=case.get("editing_threshold"),
        max_post_steps=case.get("max_post_steps", 16),
    )


def driver_of(kind: str, request: TokenRequest, options: BlockDiffusionOptions) -> BlockDriver:
    recipe = replace(recipe_of(FOLDERS[kind]()), block_length=BLOCK)
    return BlockDriver(request, options, recipe, device=torch.device("cpu"), max_positions=512)


def run(kind: str, case: dict[str, Any], *, causal: bool = False, **changes: Any) -> list[NewTokens]:
    oracle = NaiveRun({"": node(kind).model}, causal=causal)
    return oracle.run(driver_of(kind, request_of(case, **changes), options_of(case)))


def until_end(ids: list[int], case: dict[str, Any]) -> list[int]:
    return ids[: ids.index(case["end"]) + 1] if case["end"] in ids else ids


@pytest.mark.parametrize(("kind", "case"), CASES, ids=NAMES)
def test_an_answer_is_that_of_the_published_sampler(kind: str, case: dict[str, Any]) -> None:
    emitted = run(kind, case)

    assert until_end(answer(emitted), case) == case["ids"]
    assert sum(one.counts["forwards"] for one in emitted) == case["forwards"]


def test_the_recorded_answers_vary() -> None:
    for _, case in CASES:
        assert len(set(case["ids"])) >= 3
    prompts = {kind: {tuple(case["prompt"]) for case in cases} for kind, cases in RECORDED.items()}
    answers = {kind: {tuple(case["ids"]) for case in cases} for kind, cases in RECORDED.items()}
    assert all(len(answers[kind]) >= len(prompts[kind]) for kind in RECORDED)


@pytest.mark.parametrize("kind", ["llada2", "bd3lm"])
def test_a_causal_mask_gives_another_answer(kind: str) -> None:
    case = RECORDED[kind][0]

    assert answer(run(kind, case, causal=True)) != case["ids"]


def test_without_remasking_by_confidence_the_answer_is_another_one() -> None:
    case = RECORDED["bd3lm"][0]
    options = BlockDiffusionOptions(steps=1)

    found = answer(NaiveRun({"": node("bd3lm").model}).run(driver_of("bd3lm", request_of(case), options)))

    assert found != case["ids"], "all masks of a block at once"


def test_no_mask_is_ever_answered() -> None:
    for kind in FOLDERS:
        mask = recipe_of(FOLDERS[kind]()).mask_id
        for tokens in (1, 8, 19):
            case = {"prompt": [5, mask, 9], "max_tokens": tokens, "end": None, "steps": 2}
            found = answer(run(kind, case))
            assert len(found) == tokens
            assert mask not in found, "the prompt's own mask token stays literal and is not filled in"


def test_an_answer_that_is_resumed_goes_on_as_if_it_was_never_interrupted() -> None:
    warm = SamplingParams(temperature=0.9, top_k=20)
    for kind in FOLDERS:
        case = RECORDED[kind][2]
        emitted = run(kind, case, sampling=warm, seed=3)
        released = answer(emitted[:2])
        rest = run(kind, case, sampling=warm, seed=3, prefix_ids=released)
        assert released + answer(rest) == answer(emitted)


def test_seeds_and_choices_draw_apart() -> None:
    case = RECORDED["llada2"][0]
    warm = SamplingParams(temperature=1.0)

    def drawn(seed: int = 0, choice: int = 0) -> list[int]:
        short = case | {"max_tokens": 3}
        return answer(run("llada2", short, sampling=warm, seed=seed, choice=choice))

    assert drawn() == drawn() != case["ids"][:3]
    assert len({tuple(drawn(seed, choice)) for seed in (0, 1) for choice in (0, 1)}) == 4


def test_a_higher_threshold_takes_more_forwards() -> None:
    case = RECORDED["llada2"][4]

    def forwards(threshold: float) -> int:
        emitted = run("llada2", case | {"threshold": threshold})
        assert sum(one.counts["parallel_tokens"] for one in emitted) + (
            sum(one.counts["forwards"] for one in emitted)
        ) == sum(8 if place else 5 for place in range(5))
        return sum(one.counts["forwards"] for one in emitted)

    assert forwards(0.0) == 5, "one per block"
    assert 5 < forwards(0.1) < forwards(1.0) == 37, "one per place of the blocks"


def test_schedules_fill_in_every_token_as_published() -> None:
    assert even(8, 3) == [3, 3, 2]
    assert even(3, 8) == [1, 1, 1]
    assert linear(5, 3) == [2, 1, 2], "in single precision the half is less than one half"
    assert linear(8, 5) == [2, 2, 1, 2, 1], "recorded from dllm's get_num_transfer_tokens"
    for tokens in range(1, 40):
        for steps in range(1, 40):
            assert sum(even(tokens, steps)) == sum(linear(tokens, steps)) == tokens


SURE: Final[dict[str, Any]] = {"confidence_threshold": 0.05}
EDITS: Final[dict[str, Any]] = SURE | {"editing_threshold": 0.01}
CHANGES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "steps": ({}, {"steps": 2}),
    "block_length": ({}, {"block_length": 4}),
    "remasking": ({"steps": 4}, {"steps": 4, "remasking": "random"}),
    "guidance_scale": ({}, {"guidance_scale": 2.0}),
    "parallel_decoding": (SURE, SURE | {"parallel_decoding": False}),
    "confidence_threshold": ({}, SURE),
    "editing_threshold": (SURE, EDITS),
    "max_post_steps": (EDITS, EDITS | {"max_post_steps": 0}),
    "early_stop": ({}, {"early_stop": False}),
}
"""By option, the options without and with another value of it."""


@pytest.mark.parametrize("option", BlockDiffusionOptions.__struct_fields__)
def test_every_option_changes_what_is_computed(option: str) -> None:
    case = RECORDED["bd3lm"][5]

    def computed(options: dict[str, Any]) -> list[tuple[int, ...]]:
        oracle = NaiveRun({"": node("bd3lm").model})
        driver = node("bd3lm").token_programs["blocks"](
            node("bd3lm"), request_of(case | {"max_tokens": 24}, options=options)
        )
        oracle.run(driver)
        return [tuple(one.ids or ()) for one in oracle.passes]

    before, after = CHANGES[option]
    assert computed(before) != computed(after)


@pytest.mark.parametrize("threshold", ["confidence_threshold", "editing_threshold"])
def test_a_threshold_of_random_remasking_is_refused(threshold: str) -> None:
    served, options = node("bd3lm"), {"remasking": "random", threshold: 0.5}

    with pytest.raises(ClientError, match="have no meaning"):
        served.token_programs["blocks"](served, request_of(RECORDED["bd3lm"][0], options=options))


def test_random_remasking_of_llada2_follows_its_steps_alone() -> None:
    case = RECORDED["llada2"][1]
    request = request_of(case, options={"remasking": "random", "block_length": 8, "steps": 4})
    served = node("llada2")

    emitted = NaiveRun({"": served.model}).run(served.token_programs["blocks"](served, request))

    assert [one.counts["forwards"] for one in emitted] == [4, 4, 4]
