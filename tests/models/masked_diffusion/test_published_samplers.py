"""Canvases are filled in as the published samplers fill them, token by token and step by step."""

from collections.abc import Sequence
from functools import cache
from time import process_time
from typing import Any, Final

import pytest
import torch

from models.diffusion_text.canvas import CanvasDriver
from models.diffusion_text.node import DiffusionLM
from models.diffusion_text.schedule import linear
from models.masked_diffusion.nodes import load
from models.masked_diffusion.remasking import dream_shares, origin_shares
from models.programs import NewTokens, TokenRequest
from models.sequence_request import SamplingParams
from shared.errors import ClientError
from tests.models.masked_diffusion import naive
from tests.models.masked_diffusion.naive import Found
from tests.tiny.masked_diffusion import MASK_ID, tiny_dream, tiny_llada, tiny_mdlm
from tests.workers.kv_engine.programs.pass_oracle import PassOracle

FOLDERS: Final = {"llada": tiny_llada, "dream": tiny_dream, "mdlm": tiny_mdlm}
PROMPT: Final = [17, 42, 99, 7, 230, 11]
ENDLESS: Final = frozenset[int]()


@cache
def node(kind: str) -> DiffusionLM:
    return load(FOLDERS[kind](), dtype="float32")


@cache
def mask_of(kind: str) -> int:
    driver = driver_of(kind, max_tokens=1)
    return int(driver.passes()[0].ids[-1])  # type: ignore[index]


def request_of(max_tokens: int, **fields: Any) -> TokenRequest:
    sampling = fields.pop("sampling", SamplingParams())
    known: dict[str, Any] = {
        "prompt_ids": PROMPT, "prefix_ids": [], "end_ids": ENDLESS, "seed": 5, "choice": 0,
    }  # fmt: skip
    known |= {name: fields.pop(name) for name in known if name in fields}
    return TokenRequest(**known, max_tokens=max_tokens, sampling=sampling, options=fields)


def driver_of(kind: str, *, max_tokens: int, **options: Any) -> CanvasDriver:
    driver = node(kind).token_programs["canvas"](node(kind), request_of(max_tokens, **options))
    assert isinstance(driver, CanvasDriver)
    return driver


def run(kind: str, *, max_tokens: int, **options: Any) -> list[NewTokens]:
    """The emissions of an answer, over transformers' model."""
    driver, oracle = driver_of(kind, max_tokens=max_tokens, **options), PassOracle({"": node(kind).model})
    emitted: list[NewTokens] = []
    while not (emitted and emitted[-1].ended):
        taken = driver.take(oracle.results(list(driver.passes())))
        emitted += [taken] if taken is not None else []
    return emitted


def ids(emitted: Sequence[NewTokens]) -> list[int]:
    return [one for new in emitted for one in new.ids]


def forwards(emitted: Sequence[NewTokens]) -> int:
    return sum(new.counts["forwards"] for new in emitted)


def llada(gen_length: int = 16, block_length: int = 8, steps: int = 16, **options: Any) -> Found:
    prompt, causal = options.pop("prompt", PROMPT), options.pop("is_causal", False)
    forward = naive.forward_of(node("llada").model, MASK_ID, is_causal=causal)
    sizes = {"gen_length": gen_length, "block_length": block_length, "steps": steps}
    return naive.llada(forward, prompt, MASK_ID, **sizes, **options)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, {}),
        ({"steps": 8}, {"steps": 8}),
        ({"steps": 4, "guidance_scale": 1.5}, {"steps": 4, "cfg_scale": 1.5}),
        ({"confidence_threshold": 0.3}, {"threshold": 0.3}),
        ({"factor": 1.6}, {"factor": 1.6}),
    ],
    ids=["plain", "8-steps", "guided", "threshold", "factor"],
)
def test_llada_answers_as_its_published_sampler(options: dict[str, Any], others: dict[str, Any]) -> None:
    wanted = llada(**others)

    emitted = run("llada", max_tokens=16, block_length=8, **options)

    assert ids(emitted) == wanted.ids
    assert forwards(emitted) == wanted.forwards
    assert [len(new.ids) for new in emitted] == [8, 8]


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_each_step_fills_in_what_the_published_one_does(kind: str) -> None:
    if kind == "llada":
        wanted, options = llada(steps=8), {"block_length": 8, "steps": 8}
    else:
        forward = naive.forward_of(node("dream").model, MASK_ID)
        wanted = naive.dream(forward, PROMPT, MASK_ID, max_tokens=16, steps=6)
        options = {"steps": 6}
    driver, oracle = driver_of(kind, max_tokens=16, **options), PassOracle({"": node(kind).model})

    computed: list[list[int]] = []
    ended = False
    while not ended:
        [asked] = driver.passes()
        computed.append(list(asked.ids or ()))
        taken = driver.take(oracle.results([asked]))
        ended = taken is not None and taken.ended

    start = [*PROMPT, *[MASK_ID] * 16]
    assert computed == [start, *wanted.canvases[:-1]]


@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("steps", [16, 5, 24])
def test_dream_answers_as_its_published_sampler(alg: str, steps: int) -> None:
    forward = naive.forward_of(node("dream").model, MASK_ID)
    wanted = naive.dream(forward, PROMPT, MASK_ID, max_tokens=16, steps=steps, alg=alg)

    assert ids(run("dream", max_tokens=16, steps=steps, remasking=alg)) == wanted.ids


def test_answers_differ_by_model_and_by_steps() -> None:
    found = [ids(run(kind, max_tokens=16)) for kind in FOLDERS]

    assert all(len(set(one)) > 6 for one in found)
    assert len(set(map(tuple, found))) == 3
    assert llada(steps=2).ids != llada().ids, "the number of steps matters"


def test_another_mask_shift_order_or_guidance_gives_another_answer() -> None:
    forward = naive.forward_of(node("dream").model, MASK_ID)
    plain = ids(run("llada", max_tokens=16, block_length=8))

    assert llada(is_causal=True).ids != plain, "a causal mask"
    assert naive.dream(forward, PROMPT, MASK_ID, max_tokens=16, steps=16, shifts=False).ids != ids(
        run("dream", max_tokens=16)
    ), "logits that are not shifted"
    assert ids(run("llada", max_tokens=16, block_length=8, remasking="random")) != plain, "another order"
    assert llada(cfg_scale=1.5).ids != plain, "guidance"


# ---- schedules -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tokens", "steps", "shares"),
    [
        (8, 4, [1, 2, 2, 3]),
        (32, 8, [3, 4, 4, 4, 4, 4, 4, 5]),
        (16, 16, [*[1] * 14, 2]),
        (64, 16, [3, *[4] * 14, 5]),
    ],
)
def test_dreams_shares_are_cut_to_whole_numbers(tokens: int, steps: int, shares: list[int]) -> None:
    assert dream_shares(tokens, steps, 1e-3) == shares


def test_the_random_shares_of_origin_have_the_published_means() -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = [origin_shares(64, 4, 1e-3, generator) for _ in range(400)]

    assert all(sum(shares) == 64 for shares in drawn)
    means = torch.tensor([shares for shares in drawn if len(shares) == 4]).double().mean(0)
    torch.testing.assert_close(means, torch.full((4,), 16.0).double(), atol=1.0, rtol=0)


def test_the_most_steps_hold_no_other_request_up() -> None:
    begin = process_time()
    for shares in (
        linear(32, 65_536),
        dream_shares(32, 65_536, 1e-3),
        origin_shares(32, 65_536, 1e-3, torch.Generator()),
    ):
        assert sum(shares) == 32
    assert process_time() - begin < 0.5, "they are computed in the engine's thread"


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("length", [1, 63, 100])
def test_no_mask_is_ever_left(kind: str, length: int) -> None:
    found = ids(run(kind, max_tokens=length, confidence_threshold=0.02))

    assert len(found) == length
    assert mask_of(kind) not in found


def test_a_threshold_of_0_takes_a_step_per_block_and_of_1_one_per_token() -> None:
    assert forwards(run("llada", max_tokens=32, block_length=8, confidence_threshold=0.0)) == 4
    one_by_one = run("llada", max_tokens=16, block_length=8, confidence_threshold=1.0)
    assert forwards(one_by_one) == 16
    assert ids(one_by_one) == llada().ids
    assert sum(new.counts["parallel_tokens"] for new in one_by_one) == 0


def test_the_last_block_may_be_shorter() -> None:
    assert [len(new.ids) for new in run("llada", max_tokens=70)] == [32, 32, 6]


# ---- randomness ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", FOLDERS)
def test_equal_seeds_give_equal_answers_and_others_differ(kind: str) -> None:
    warm = SamplingParams(temperature=1.0)
    first, again, other = (ids(run(kind, max_tokens=12, sampling=warm, seed=seed)) for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert ids(run(kind, max_tokens=12, sampling=warm, seed=1, choice=1)) != first


def test_draws_follow_the_probabilities() -> None:
    draw = driver_of("llada", max_tokens=4)._recipe.draw
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).double().expand(6000, -1)

    found = draw(logits, SamplingParams(temperature=1.0), torch.Generator().manual_seed(0))

    shares = torch.bincount(found.ids, minlength=4) / 6000
    torch.testing.assert_close(shares.double(), logits[0].softmax(-1), atol=0.02, rtol=0)


# ---- caches --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_with_one_step_per_block_a_cache_changes_nothing(kind: str, cache: str) -> None:
    options = {"max_tokens": 24, "block_length": 8, "steps": 3}

    assert ids(run(kind, **options, cache=cache)) == ids(run(kind, **options))


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize(("cache", "tokens"), [("prefix", 16), ("dual", 8)])
def test_a_cache_computes_the_block_again_and_no_more_than_it_says(
    kind: str, cache: str, tokens: int
) -> None:
    driver = driver_of(kind, max_tokens=16, block_length=8, cache=cache)
    oracle = PassOracle({"": node(kind).model})
    sizes = []
    for _ in range(3):
        [asked] = driver.passes()
        sizes.append(asked.tokens)
        driver.take(oracle.results([asked]))

    again = kind == "dream"  # the token before the block, whose logits are those of its first one
    assert sizes == [len(PROMPT) + 16, tokens + again, tokens + again]


# ---- ends, resumption, refusals ------------------------------------------------------------------
@pytest.mark.parametrize("kind", FOLDERS)
def test_an_answer_ends_early_with_the_same_text(kind: str) -> None:
    whole = ids(run(kind, max_tokens=32, block_length=8))
    end = whole[9]
    cut = whole[: whole.index(end) + 1]

    early = run(kind, max_tokens=32, block_length=8, end_ids=frozenset({end}))
    late = run(kind, max_tokens=32, block_length=8, end_ids=frozenset({end}), early_stop=False)

    assert ids(early)[: len(cut)] == cut == ids(late)[: len(cut)]
    assert forwards(early) <= forwards(late) < 32


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_resumed_answer_goes_on_as_if_it_was_never_interrupted(kind: str) -> None:
    warm: dict[str, Any] = {
        "sampling": SamplingParams(temperature=0.8),
        "block_length": 8,
        "max_tokens": 24,
    }
    whole = ids(run(kind, **warm))

    assert ids(run(kind, **warm, prefix_ids=whole[:8])) == whole[8:]


def test_a_mask_in_the_prompt_stays_literal() -> None:
    prompt = [17, MASK_ID, 99]
    driver = driver_of("llada", max_tokens=8, prompt_ids=prompt)
    oracle = PassOracle({"": node("llada").model})
    for _ in range(4):
        [asked] = driver.passes()
        assert list(asked.ids or ())[:3] == prompt
        driver.take(oracle.results([asked]))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"steps": 5, "block_length": 8}, "steps: expected a multiple of the 2 blocks"),
        ({"confidence_threshold": 0.9, "remasking": "random"}, "have no meaning"),
        ({"confidence_threshold": 0.9, "factor": 1.0}, "expected one of them"),
        ({"alg_temp": 0.5}, "alg_temp: expected remasking maskgit_plus"),
    ],
)
def test_options_that_exclude_one_another_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ClientError, match=problem):
        driver_of("llada", max_tokens=16, **options)
