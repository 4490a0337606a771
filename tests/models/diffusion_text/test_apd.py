"""Adaptive parallel decoding: a restated reference without caches, and what the paper promises.

The denoiser and the verifier are tiny models with random weights and one vocabulary. The reference computes
both models over everything in every round, and draws the same noise.
"""

from functools import cache
from typing import Any, Final

import pytest
import torch

from models.checkpoints.files import CheckpointError
from models.diffusion_text.apd import VERIFIER, ApdDriver, ApdSettings
from models.diffusion_text.filters import filtered_logits
from models.diffusion_text.seeds import generator_of
from models.diffusion_text.verifier import check_vocabularies
from models.programs import NewTokens, TokenRequest
from models.sequence_request import SamplingParams
from models.transformers_lm.loader import load_decoder
from tests.models.block_diffusion.naive import NaiveRun, answer
from tests.tiny import tiny_checkpoint

MASK: Final = 511
PROMPT: Final = [17, 42, 99, 7, 230, 11, 5]
CPU: Final = torch.device("cpu")


@cache
def model(name: Any, seed: int = 0) -> Any:
    return load_decoder(tiny_checkpoint(name, seed=seed), "llm").model


def request_of(tokens: int = 16, temperature: float | None = None, **fields: Any) -> TokenRequest:
    known: dict[str, Any] = {"prefix_ids": [], "end_ids": frozenset[int](), "seed": 5, "choice": 0}
    sampling = SamplingParams(temperature=temperature)
    return TokenRequest(
        prompt_ids=PROMPT, max_tokens=tokens, sampling=sampling, options={}, **(known | fields)
    )


class Counted:
    """A verifier that is counted, or a distribution in its place."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.tokens = inner, 0

    def __call__(self, **given: Any) -> Any:
        self.tokens += given["input_ids"].shape[1]
        return self.inner(**given)


def run(
    settings: ApdSettings, request: TokenRequest, *, shifts: bool = True, verifier: Any = None
) -> list[NewTokens]:
    driver = ApdDriver(request, settings, mask_id=MASK, shifts=shifts, vocab_size=512, device=CPU)
    return NaiveRun({"": model("qwen2"), VERIFIER: verifier or model("qwen3", 3)}).run(driver)


@torch.inference_mode()
def reference(settings: ApdSettings, request: TokenRequest, *, shifts: bool = True) -> list[list[int]]:
    """The tokens of each round."""
    x, end = [*request.prompt_ids], len(PROMPT) + request.max_tokens
    rounds: list[list[int]] = []
    while len(x) < end:
        c, right = len(x), min(len(x) + settings.lookahead, end)
        canvas = torch.tensor([x + [MASK] * (right - c)])
        full = torch.zeros(1, 1, right, right)
        d = model("qwen2")(canvas, attention_mask=full, use_cache=False).logits[0]
        d = d[c - 1 : right - 1] if shifts else d[c:right]
        noise = torch.zeros_like(d)
        if request.sampling.temperature:
            noise = -torch.empty_like(d).exponential_(generator=generator_of(request, c, CPU)).log()
        d[:, MASK] = -1e9
        drafts = (filtered_logits(d, request.sampling) + noise).argmax(-1)
        text = torch.tensor([x + drafts.tolist()])
        a = model("qwen3", 3)(text, use_cache=False).logits[0][c - 1 : right - 1]
        a[:, MASK] = -1e9
        product = settings.denoiser_weight * d + (1 - settings.denoiser_weight) * a
        chosen = (filtered_logits(product, request.sampling) + noise).argmax(-1)
        accepted = 1
        while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
            accepted += 1
        rounds.append(drafts[:accepted].tolist())
        x += rounds[-1]
    return rounds


@pytest.mark.parametrize("temperature", [None, 0.8])
@pytest.mark.parametrize(
    ("weight", "lookahead", "shifts"), [(0.7, 100, True), (0.95, 5, False), (0.0, 4, True)]
)
def test_each_round_is_that_of_the_reference(
    weight: float, lookahead: int, shifts: bool, temperature: float | None
) -> None:
    settings = ApdSettings(denoiser_weight=weight, lookahead=lookahead)
    request = request_of(temperature=temperature)

    emitted = run(settings, request, shifts=shifts)

    assert [list(one.ids) for one in emitted] == reference(settings, request, shifts=shifts)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_denoiser_that_has_all_the_weight_is_always_accepted(temperature: float | None) -> None:
    settings = ApdSettings(denoiser_weight=1.0, lookahead=6)

    emitted = run(settings, request_of(temperature=temperature))

    assert [len(one.ids) for one in emitted] == [6, 6, 4]
    assert all(one.counts["verifier_forwards"] == 0 for one in emitted)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_verifier_with_the_same_distribution_accepts_all(temperature: float | None) -> None:
    """It is given the denoiser's own logits of each draft."""
    seen: list[torch.Tensor] = []

    def denoiser(**given: Any) -> Any:
        output = model("qwen2")(**given)
        seen.append(output.logits[0])
        return output

    def same(**given: Any) -> Any:
        output = model("qwen3", 3)(**given)
        count = given["input_ids"].shape[1]
        output.logits[0] = seen[-1][-count - 1 : -1] if len(seen[-1]) > count else seen[-1][:count]
        return output

    driver = ApdDriver(
        request_of(temperature=temperature),
        ApdSettings(denoiser_weight=0.5),
        mask_id=MASK,
        shifts=True,
        vocab_size=512,
        device=CPU,
    )
    emitted = NaiveRun({"": denoiser, VERIFIER: same}).run(driver)

    assert [len(one.ids) for one in emitted] == [16]


def test_noise_that_is_not_shared_would_accept_less() -> None:
    """The control for the noise: the reference code of the paper's authors drops it in the acceptance."""
    request = request_of(temperature=1.0)
    with_noise = run(ApdSettings(denoiser_weight=0.99), request)
    assert len(with_noise) < 4

    drivers = _WithoutNoise(
        request, ApdSettings(denoiser_weight=0.99), mask_id=MASK, shifts=True, vocab_size=512, device=CPU
    )
    without = NaiveRun({"": model("qwen2"), VERIFIER: model("qwen3", 3)}).run(drivers)
    assert len(without) > 10


class _WithoutNoise(ApdDriver):
    """Accepts by the argmax of the product, whatever the temperature."""

    def _agreeing(self, drafts: Any, verifier: torch.Tensor | None) -> int:
        drafts.noise.zero_()
        return super()._agreeing(drafts, verifier)


def test_the_first_draft_is_accepted_whatever_the_verifier_says() -> None:
    emitted = run(ApdSettings(denoiser_weight=0.0, threshold=1.0), request_of(8))

    assert [len(one.ids) for one in emitted] == [1] * 8


def test_a_window_over_everything_changes_nothing_and_a_short_one_does() -> None:
    exact = answer(run(ApdSettings(), request_of()))

    assert answer(run(ApdSettings(window=len(PROMPT) + 16), request_of())) == exact
    assert answer(run(ApdSettings(window=1), request_of())) != exact, "keys are out of date"


def test_a_window_computes_fewer_tokens() -> None:
    def computed(window: int | None) -> int:
        oracle = NaiveRun({"": model("qwen2"), VERIFIER: model("qwen3", 3)})
        settings = ApdSettings(window=window, lookahead=4)
        oracle.run(ApdDriver(request_of(24), settings, mask_id=MASK, shifts=True, vocab_size=512, device=CPU))
        sizes = [one.tokens for one in oracle.passes if not one.tower]
        assert window is None or max(sizes[1:]) <= 4 + window - 1 + 4
        return sum(sizes) // len(sizes)

    assert computed(2) * 2 < computed(None)


def test_the_verifier_computes_no_token_twice_but_the_last() -> None:
    counted = Counted(model("qwen3", 3))
    emitted = run(ApdSettings(lookahead=4), request_of(), verifier=counted)

    rounds = sum(one.counts["verifier_forwards"] for one in emitted)
    assert counted.tokens <= len(PROMPT) + 4 * rounds, "its keys are cropped to what was accepted"


def test_a_threshold_accepts_less() -> None:
    def rounds(threshold: float) -> int:
        return len(run(ApdSettings(denoiser_weight=1.0, threshold=threshold), request_of()))

    assert rounds(0.0) == 1 < rounds(0.3) <= rounds(1.0) == 16


def test_an_answer_ends_with_an_end_token_and_holds_no_mask() -> None:
    free = answer(run(ApdSettings(), request_of()))
    end = next(token for place, token in enumerate(free) if place >= 6 and token not in free[:place])

    emitted = run(ApdSettings(), request_of(end_ids=frozenset([end])))

    assert emitted[-1].ended
    assert answer(emitted)[: free.index(end) + 1] == free[: free.index(end) + 1]
    assert MASK not in free


@pytest.mark.parametrize("temperature", [None, 0.8])
def test_an_answer_goes_on_after_the_rounds_of_an_earlier_attempt(temperature: float | None) -> None:
    request = request_of(temperature=temperature)
    emitted = run(ApdSettings(), request)
    released = answer(emitted[:2])

    rest = run(ApdSettings(), request_of(temperature=temperature, prefix_ids=released))

    assert released + answer(rest) == answer(emitted)


def test_a_verifier_with_another_vocabulary_is_refused_by_name() -> None:
    check_vocabularies(tiny_checkpoint("qwen2"), tiny_checkpoint("qwen3"))

    with pytest.raises(CheckpointError, match="has another vocabulary than"):
        check_vocabularies(tiny_checkpoint("qwen2"), tiny_checkpoint("gemma"))
