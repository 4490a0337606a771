"""Canvases in the engine: the tokens of the published samplers, packed with others and staggered."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import pytest

from models.masked_diffusion.nodes import load
from tests.models.masked_diffusion import naive
from tests.tiny.masked_diffusion import MASK_ID, tiny_dream, tiny_llada
from tests.workers.kv_engine.engines import make_engine
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import EmissionOutput, Output
from workers.kv_engine.sequence_spec import SequenceSpec

SIZES: Final[dict[str, Any]] = {
    "num_blocks": 200,
    "block_size": 8,
    "max_step_tokens": 64,
    "max_sequences": 16,
    "max_pass_tokens": 256,
}
FOLDERS: Final = {"llada": tiny_llada, "dream": tiny_dream}
PROMPTS: Final = [[*range(10, 10 + length)] for length in (3, 17, 9, 30)]
TOKENS: Final = 16


def engine(kind: str) -> KVEngine:
    return make_engine(load(FOLDERS[kind](), dtype="float32"), **SIZES)


def spec(number: int, **options: Any) -> SequenceSpec:
    return SequenceSpec(
        key=str(number),
        prompt_ids=PROMPTS[number],
        max_tokens=TOKENS,
        token_program="canvas",
        options={"block_length": 8, **options},
    )


def tokens(outputs: Sequence[Output], key: str) -> list[int]:
    return [
        one for out in outputs if isinstance(out, EmissionOutput) and out.key == key for one in out.token_ids
    ]


def served(running: KVEngine, specs: Sequence[SequenceSpec], *, apart: int = 0) -> dict[str, list[int]]:
    """The answers; each sequence comes `apart` steps after the one before."""
    outputs: list[Output] = []
    for one in specs:
        running.add(one)
        for _ in range(apart):
            outputs += running.step()
    while running.has_work:
        outputs += running.step()
    return {one.key: tokens(outputs, one.key) for one in specs}


@cache
def expected(kind: str, number: int) -> list[int]:
    model = load(FOLDERS[kind](), dtype="float32").model
    forward = naive.forward_of(model, MASK_ID)
    if kind == "llada":
        return naive.llada(
            forward, PROMPTS[number], MASK_ID, gen_length=TOKENS, block_length=8, steps=TOKENS
        ).ids
    return naive.dream(forward, PROMPTS[number], MASK_ID, max_tokens=TOKENS, steps=TOKENS).ids


@pytest.mark.parametrize("kind", FOLDERS)
def test_answers_at_once_and_staggered_are_the_published_samplers(kind: str) -> None:
    options = {} if kind == "llada" else {"block_length": None}
    specs = [spec(number, **options) for number in range(len(PROMPTS))]
    wanted = {one.key: expected(kind, int(one.key)) for one in specs}

    assert served(engine(kind), specs) == wanted
    assert served(engine(kind), specs, apart=3) == wanted


def test_guidance_and_caches_run_in_the_engine() -> None:
    running = engine("llada")
    guided, cached, dual = (
        {"guidance_scale": 1.0, "steps": 4},
        {"cache": "prefix", "steps": 2},
        {"cache": "dual", "steps": 2},
    )
    plain = served(running, [spec(3, steps=2)])["3"]

    model = load(tiny_llada(), dtype="float32").model
    wanted = naive.llada(
        naive.forward_of(model, MASK_ID), PROMPTS[3], MASK_ID,
        gen_length=TOKENS, block_length=8, steps=4, cfg_scale=1.0,
    ).ids  # fmt: skip
    assert served(running, [spec(3, **guided)])["3"] == wanted
    # One step per block computes everything, so a cache changes nothing.
    assert served(running, [spec(3, **cached)])["3"] == plain
    assert served(running, [spec(3, **dual)])["3"] == plain
    assert served(running, [spec(3, cache="dual", steps=8)])["3"] != [], (
        "and further steps run behind kept keys"
    )
