"""Block diffusion and APD in the engine: the tokens of transformers' own forward, at once and staggered."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import pytest

from models.block_diffusion.nodes import load as load_blocks
from models.diffusion_text.node import DiffusionLM
from models.masked_diffusion.nodes import load as load_masked
from models.programs import TokenRequest
from models.sequence_request import SamplingParams
from tests.models.block_diffusion.naive import NaiveRun, answer
from tests.tiny.block_diffusion import tiny_bd3lm, tiny_llada2, tiny_verifier
from tests.tiny.masked_diffusion import tiny_dream
from tests.workers.kv_engine.engines import make_engine
from workers.kv_engine.outputs import EmissionOutput, Output
from workers.kv_engine.sequence_spec import SequenceSpec

SIZES: Final[dict[str, Any]] = {
    "num_blocks": 300,
    "block_size": 8,
    "max_step_tokens": 64,
    "max_sequences": 16,
    "max_pass_tokens": 512,
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "llada2": {"block_length": 8, "confidence_threshold": 0.2},
    "bd3lm": {"steps": 3, "guidance_scale": 0.5},
    "apd": {"apd": True, "apd_lookahead": 6, "apd_verifier_weight": 0.05},
}
PROMPTS: Final = [[*range(10, 10 + length)] for length in (3, 17, 9)]
TOKENS: Final = 18


@cache
def node(kind: str) -> DiffusionLM:
    if kind != "apd":
        return load_blocks(tiny_llada2() if kind == "llada2" else tiny_bd3lm(), dtype="float32")
    return load_masked(tiny_dream(), dtype="float32", kwargs={"verifier": str(tiny_verifier())})


def program_of(kind: str) -> str:
    return "apd" if kind == "apd" else "blocks"


def spec(kind: str, number: int, prefix: Sequence[int] = ()) -> SequenceSpec:
    return SequenceSpec(
        key=str(number),
        prompt_ids=PROMPTS[number],
        prefix_ids=[*prefix],
        max_tokens=TOKENS,
        token_program=program_of(kind),
        options=OPTIONS[kind],
    )


@cache
def expected(kind: str, number: int) -> list[int]:
    request = TokenRequest(
        prompt_ids=PROMPTS[number],
        prefix_ids=[],
        max_tokens=TOKENS,
        end_ids=frozenset(),
        sampling=SamplingParams(),
        options=OPTIONS[kind],
        seed=0,
        choice=0,
    )
    served = node(kind)
    models = {"": served.model} | {name: tower.model for name, tower in served.towers.items()}
    return answer(NaiveRun(models).run(served.token_programs[program_of(kind)](served, request)))


def serve(kind: str, specs: Sequence[SequenceSpec], *, apart: int = 0) -> dict[str, list[list[int]]]:
    """The emissions of each answer; each sequence comes `apart` steps after the one before."""
    engine, outputs = make_engine(node(kind), **SIZES), list[Output]()
    for one in specs:
        engine.add(one)
        for _ in range(apart):
            outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
    found = [one for one in outputs if isinstance(one, EmissionOutput)]
    return {one.key: [[*out.token_ids] for out in found if out.key == one.key] for one in specs}


def joined(emissions: Sequence[Sequence[int]]) -> list[int]:
    return [token for one in emissions for token in one]


@pytest.mark.parametrize("kind", OPTIONS)
def test_answers_at_once_and_staggered_are_those_of_a_naive_run(kind: str) -> None:
    specs = [spec(kind, number) for number in range(len(PROMPTS))]
    wanted = {one.key: expected(kind, int(one.key)) for one in specs}

    for apart in (0, 2):
        found = serve(kind, specs, apart=apart)
        assert {key: joined(emissions) for key, emissions in found.items()} == wanted
    assert len(set(wanted["1"])) > 4


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_answer_goes_on_after_what_an_earlier_attempt_released(kind: str) -> None:
    emissions = serve(kind, [spec(kind, 1)])["1"]
    released = joined(emissions[:1])

    rest = serve(kind, [spec(kind, 1, released)])["1"]

    assert released + joined(rest) == expected(kind, 1)


def test_a_long_prompt_is_committed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected("bd3lm", 1)

    monkeypatch.setattr("models.block_diffusion.driver._CHUNK", 8)

    assert joined(serve("bd3lm", [spec("bd3lm", 1)])["1"]) == whole


def test_an_answer_whose_last_block_is_cut_may_fill_the_whole_pool() -> None:
    needed = -(-(len(PROMPTS[1]) + TOKENS) // SIZES["block_size"])
    engine = make_engine(node("bd3lm"), **SIZES | {"num_blocks": needed})

    engine.add(replace(spec("bd3lm", 1), options={"block_length": 32}))

    outputs = [one for _ in range(200) if engine.has_work for one in engine.step()]
    assert sum(len(one.token_ids) for one in outputs if isinstance(one, EmissionOutput)) == TOKENS
