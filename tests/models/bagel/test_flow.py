"""The programs of BAGEL over a naive engine, against a restatement, and against each other."""

from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from models.bagel.branches import image_routes
from models.bagel.combine import CombineCfg
from models.bagel.drawing import FlowRequest
from models.bagel.flow import start_branch, start_flow
from models.bagel.guidance import first_latents, guided, steps_of
from models.bagel.llm import BagelLM
from models.bagel.nodes import load
from models.bagel.options import BagelOptions, flow_settings
from models.bagel.spans import BRANCHES, CFG_IMG, CFG_TEXT, MAIN, Kind, Span, contexts_of
from models.bagel.walks import WALKS
from models.base import Item
from models.programs import Going, Mask, Pass, Turn
from tests.models.bagel.dense_passes import DensePasses
from tests.tiny.bagel import bagel_checkpoint

SEED = 5
ALL_BRANCHES: dict[str, Any] = {"cfg_img_scale": 2.0, "cfg_interval": (0.0, 1.0)}
EDIT = [Span(Kind.SYSTEM, 3), Span(Kind.VAE, 6, "a"), Span(Kind.VIT, 5, "b"), Span(Kind.TEXT, 4)]


@cache
def node(name: str = "LLM") -> BagelLM:
    found = load(bagel_checkpoint(), name)
    assert isinstance(found, BagelLM)
    return found


def request(spans: list[Span], *, width: int = 48, height: int = 32, **options: Any) -> FlowRequest:
    """A drawing of 2 x 3 tokens, in 6 steps."""
    settings = BagelOptions(**({"num_timesteps": 7} | options))
    is_edit = any(span.kind is Kind.VAE for span in spans)
    return FlowRequest(spans=spans, flow=flow_settings(settings, is_edit=is_edit), width=width, height=height)


def inputs(spans: list[Span], *, thought: int = 0) -> dict[str, torch.Tensor]:
    """Token ids of the spans and of a thought, and rows for the images."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 40, (sum(span.tokens for span in spans) + thought,), generator=draw)
    rows = sum(span.tokens for span in spans if span.kind.is_image)
    return {"token_ids": ids.int(), "embeds": torch.randn(rows, 64, generator=draw)}


def drawn(
    asked: FlowRequest, given: dict[str, torch.Tensor], seed: int = SEED
) -> tuple[torch.Tensor, DensePasses]:
    """The latents by the program `flow`, and the engine that computed them."""
    engine = DensePasses(node())
    found = engine.run(start_flow(node(), given, msgspec.to_builtins(asked), seed=seed))
    assert not isinstance(found, Turn)
    return found["latents"], engine


def flow_passes(engine: DensePasses) -> int:
    return sum(not one.commits for asked in engine.asked for one in asked)


def velocity(
    name: str, asked: FlowRequest, given: dict[str, torch.Tensor], embeds: torch.Tensor
) -> torch.Tensor:
    """The velocity behind one context, which is computed from its beginning, span by span."""
    engine, position, ids = DensePasses(node()), 0, given["token_ids"].tolist()
    for place in contexts_of(asked.spans_of(len(ids)))[name]:
        span = place.span
        if not span.kind.is_image:
            text = ids[place.first : place.first + span.tokens]
            engine.results([Pass(context="one", ids=text, commits=True)])
            position += span.tokens
            continue
        rows = given["embeds"][place.first_row : place.first_row + span.tokens]
        routes = image_routes(span.tokens) if span.kind is Kind.VAE else None
        of_image: dict[str, Any] = {
            "embeds": rows,
            "positions": position,
            "mask": Mask.FULL,
            "routes": routes,
        }
        engine.results([Pass(context="one", commits=True, **of_image)])
        position += 1
    routes = image_routes(len(embeds))
    last = Pass(context="one", embeds=embeds, positions=position, mask=Mask.FULL, routes=routes)
    return node().velocity(engine.results([last])[0])


@torch.inference_mode()
def restated(asked: FlowRequest, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The latents, with all three branches in every step."""
    latents = first_latents(asked, 64, SEED)
    for step in steps_of(asked.flow):
        embeds = node().latent_embeds(latents, step.time, asked.grid)
        main, text, images = (velocity(name, asked, given, embeds) for name in (MAIN, CFG_TEXT, CFG_IMG))
        found = guided(asked.flow, main, text if step.by_text else None, images if step.by_images else None)
        latents = latents - found * step.length
    return latents


CASES = {
    "text": ([Span(Kind.TEXT, 5)], {}, 0),
    "without guidance": ([Span(Kind.TEXT, 5)], {"cfg_text_scale": 1.0}, 0),
    "two texts": ([Span(Kind.TEXT, 5), Span(Kind.TEXT, 3)], ALL_BRANCHES, 0),
    "thought": ([Span(Kind.SYSTEM, 3), Span(Kind.TEXT, 5)], ALL_BRANCHES, 4),
    "instructions last": ([Span(Kind.TEXT, 5), Span(Kind.SYSTEM, 3)], ALL_BRANCHES, 4),
    "edit": (EDIT, {}, 0),
    "edit with thought": (EDIT, {"cfg_renorm_type": "channel"}, 3),
    "image last": ([*EDIT[3:], *EDIT[1:3]], {}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_flow_equals_a_restatement(name: str) -> None:
    spans, options, thought = CASES[name]
    asked, given = request(spans, **options), inputs(spans, thought=thought)
    found, _ = drawn(asked, given)
    expected = restated(asked, given)
    assert torch.allclose(found, expected, atol=2e-4 * float(expected.abs().max()))
    assert float((found - first_latents(asked, 64, SEED)).abs().max()) > 0.1, "the flow moves the noise"


def test_every_input_matters() -> None:
    spans, options, thought = CASES["edit with thought"]
    asked, given = request(spans, **options), inputs(spans, thought=thought)
    found, _ = drawn(asked, given)
    others = [
        drawn(asked, given | {"token_ids": given["token_ids"].flip(0)})[0],
        drawn(asked, given | {"embeds": given["embeds"].flip(0)})[0],
        drawn(asked, given, seed=SEED + 1)[0],
        drawn(request(spans, **options, cfg_text_scale=1.0), given)[0],
        drawn(request(spans, **options, cfg_img_scale=1.0), given)[0],
        drawn(request(spans, **options, timestep_shift=1.0), given)[0],
        drawn(request(spans, **options, cfg_renorm_min=1.0), given)[0],
        drawn(request(spans, **options, cfg_interval=(0.5, 1.0)), given)[0],
        drawn(request(spans, cfg_renorm_type="global"), given)[0],
    ]
    for other in others:
        assert float((found - other).abs().max()) > 1e-3


def test_a_velocity_without_weight_is_not_computed() -> None:
    settings = flow_settings(BagelOptions(), is_edit=False)
    steps = steps_of(settings)
    assert len(steps) == 49
    assert sum(1 + step.by_text + step.by_images for step in steps) == 90
    asked = request(CASES["text"][0], cfg_interval=(0.6, 1.0))
    with_guidance = sum(step.by_text for step in steps_of(asked.flow))
    assert 0 < with_guidance < 6
    _, engine = drawn(asked, inputs(CASES["text"][0]))
    assert flow_passes(engine) == 6 + with_guidance


def test_branches_with_equal_prompts_are_one() -> None:
    spans = CASES["two texts"][0]
    _, engine = drawn(request(spans, **ALL_BRANCHES), inputs(spans))
    assert set(engine.contexts) == {MAIN, CFG_TEXT}, "without images and thoughts, the texts are the prompt"
    assert flow_passes(engine) == 2 * 6


@pytest.mark.parametrize("name", CASES)
def test_room_is_declared(name: str) -> None:
    spans, options, thought = CASES[name]
    asked, given = request(spans, **options), inputs(spans, thought=thought)
    driver = start_flow(node(), given, msgspec.to_builtins(asked), seed=SEED)
    engine = DensePasses(node())
    engine.run(driver)
    assert driver.max_contexts == len(engine.contexts)
    shared = {one.context: one.after or 0 for asked in engine.asked for one in asked if one.forks}
    used = sum(tokens - shared.get(context, 0) for context, tokens in engine.contexts.items())
    assert driver.max_tokens == used + len(engine.contexts) * (asked.tokens + 2)
    assert driver.max_tokens <= asked.room_for(thought)


def test_a_flow_resumes_at_its_checkpoint() -> None:
    spans = CASES["edit"][0]
    asked, given, args = request(spans), inputs(spans), msgspec.to_builtins(request(spans))
    whole, _ = drawn(asked, given)
    first, engine = start_flow(node(), given, args, seed=SEED), DensePasses(node())
    states: list[Any] = []
    progress: list[Any] = []
    while not states:
        found = first.take(engine.results(first.passes()))
        if isinstance(found, Going):
            progress.append(found.progress)
            states += [found.state] if found.state else []
    assert progress == [{"step": step, "steps": 6} for step in range(1, 6)]
    second = start_flow(node(), given, args, seed=SEED + 1)
    second.resume(states[0])  # type: ignore[attr-defined]
    engine = DensePasses(node())
    resumed = engine.run(second)
    assert not isinstance(resumed, Turn)
    assert torch.equal(resumed["latents"], whole)
    assert flow_passes(engine) == 3, "one step of three branches"


State = dict[str, torch.Tensor]


def drawn_by_three(
    asked: FlowRequest, given: State, state: State | None = None
) -> tuple[list[State], dict[str, DensePasses]]:
    """The state after each iteration of the loop over three nodes, and the nodes' engines."""
    args = msgspec.to_builtins(asked)
    state = state or {"latents": torch.zeros(0), "time_index": torch.tensor([0])}
    drivers = {one: start_branch(node(one), given | state, args, seed=SEED) for one in BRANCHES}
    engines = {one: DensePasses(node(one)) for one in BRANCHES}
    states: list[State] = []
    stops: tuple[str, ...] = ()
    while not stops:
        velocities: State = {}
        for one, driver in drivers.items():
            if states:
                driver.more(state)  # type: ignore[attr-defined]
            turn = engines[one].run(driver)
            assert isinstance(turn, Turn)
            assert states or not engines[one].contexts, "the first call takes room, and computes nothing"
            velocities |= turn.outputs
        [combined] = CombineCfg().run([Item(inputs=state | velocities, args=args, seed=SEED)])
        assert not isinstance(combined, Exception)
        assert bool(combined.progress) == bool(states), "the iteration that takes room is no step"
        state, stops = dict(combined.outputs), combined.stops
        states.append(state)
    assert stops == tuple(WALKS["image_gen_cfg"].loops)
    return states, engines


@pytest.mark.parametrize("name", ["text", "thought", "instructions last", "edit", "two texts"])
def test_three_nodes_draw_the_same(name: str) -> None:
    spans, options, thought = CASES[name]
    asked, given = request(spans, **options), inputs(spans, thought=thought)
    expected, _ = drawn(asked, given)
    states, engines = drawn_by_three(asked, given)
    assert len(states) == 7, "six steps, and the iteration that takes room"
    assert torch.allclose(states[-1]["latents"], expected, atol=1e-5)
    contexts = contexts_of(asked.spans_of(len(given["token_ids"])))
    weighty = [one for step in steps_of(asked.flow) for one in step.branches]
    needed = sum(one == MAIN or contexts[one] != contexts[MAIN] for one in weighty)
    assert sum(flow_passes(one) for one in engines.values()) == needed, "nothing without weight is computed"


def test_three_nodes_draw_the_same_from_a_checkpoint_of_their_loop() -> None:
    spans, options, thought = CASES["edit with thought"]
    asked, given = request(spans, **options), inputs(spans, thought=thought)
    states, _ = drawn_by_three(asked, given)
    for number, state in enumerate(states[:-1]):
        later, _ = drawn_by_three(asked, given, state)
        assert len(later) == 1 + 6 - number
        assert torch.equal(later[-1]["latents"], states[-1]["latents"])
