"""BAGEL's nodes and its flow against what the published code computed on the same weights and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from models.bagel import images
from models.bagel.drawing import FlowRequest
from models.bagel.flow import start_flow
from models.bagel.llm import BagelLM
from models.bagel.nodes import load
from models.bagel.options import BagelOptions, FlowSettings
from models.bagel.prompts import THINK_BEFORE_IMAGE
from models.bagel.spans import LATENTS, Kind, Span, parts_of
from models.base import Item, StatelessResult
from models.vision_language.visuals import Visual
from tests.models.bagel.cases import CASES, SEED, Case, picture, published
from tests.models.bagel.dense_passes import DensePasses
from tests.tiny.bagel import bagel_checkpoint

BOS, EOS = "<|im_start|>", "<|im_end|>"


@cache
def node(name: str) -> Any:
    return load(bagel_checkpoint(), name)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(bagel_checkpoint() / "tokenizer.json"))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as spans, tokens, and the rows of its images."""

    spans: list[Span]
    ids: list[int]
    rows: torch.Tensor


def token_id(text: str) -> int:
    found = tokenizer().token_to_id(text)
    assert found is not None
    return found


def text_ids(text: str) -> list[int]:
    return [token_id(BOS), *tokenizer().encode(text, add_special_tokens=False).ids, token_id(EOS)]


def item(inputs: dict[str, torch.Tensor], **args: Any) -> Item:
    return Item(inputs=inputs, args=args, seed=SEED)


def outputs(name: str, one: Item) -> dict[str, torch.Tensor]:
    [result] = node(name).run([one])
    assert isinstance(result, StatelessResult), result
    return dict(result.outputs)


def visual(pixels: np.ndarray[Any, Any], cells: int) -> Visual:
    rows = pixels.shape[1] * pixels.shape[2] // cells**2 + 2
    return Visual(digest=f"{pixels.shape}", shape=pixels.shape, rows=rows)


@cache
def image_rows(*, is_edit: bool) -> tuple[list[Span], torch.Tensor]:
    """The spans and rows of the picture, by the encoders."""
    image = images.resized(Image.fromarray(picture()), BagelOptions())
    for_vit, for_vae = (images.pixels_of(one) for one in (images.vit_image(image), image))
    vit, vae = visual(for_vit, 14), visual(for_vae, 16)
    inputs = {"pixels": torch.from_numpy(for_vit).flatten()}
    spans, order = [Span(Kind.VIT, vit.rows, "i")], ["vit"]
    if is_edit:
        pixels = torch.from_numpy(for_vae).flatten()
        asked = item({"vae_pixels": pixels}, vae_visuals=[msgspec.to_builtins(vae)])
        inputs |= outputs("vae_encoder", asked)
        spans, order = [Span(Kind.VAE, vae.rows, "l"), *spans], ["vae", "vit"]
    args = {"visuals": [vit], "vae_visuals": [vae], "order": order}
    return spans, outputs("vit_encoder", item(inputs, **msgspec.to_builtins(args)))["embeds"]


def prompt(case: Case, thought: Sequence[int] = ()) -> Prompt:
    """The prompt of a case, as the published inferencer makes it."""
    spans, ids, rows = list[Span](), list[int](), [torch.zeros(0, 64)]
    if case.options.get("think"):
        ids += text_ids(THINK_BEFORE_IMAGE)
        spans.append(Span(Kind.SYSTEM, len(ids)))
    for one in case.inputs:
        if one is None:
            own, embeds = image_rows(is_edit=not case.options.get("understanding_output"))
            spans += own
            rows.append(embeds)
            ids += [0] * len(embeds)
        else:
            own_ids = text_ids(one)
            spans.append(Span(Kind.TEXT, len(own_ids)))
            ids += own_ids
    return Prompt(spans, [*ids, *thought], torch.cat(rows))


def logits(given: Prompt, spoken: Sequence[int]) -> torch.Tensor:
    """The logits at the last token of a prompt that is continued by `spoken`: one dense forward."""
    llm: BagelLM = node("LLM")
    parts, ids = parts_of(given.spans, seed=SEED), [*given.ids, *spoken]
    positions, _ = llm.positions(ids, parts)
    embeds = llm.text_model.embed_tokens(torch.tensor(ids))
    at = [place for part in parts for place in range(part.start, part.start + part.count)]
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    if at:
        embeds = llm.splice(torch.tensor(ids), given.rows, torch.tensor(at))
    for part in parts:
        of_part = slice(part.start, part.start + part.count)
        visible[of_part, of_part] = True
    hidden = llm.text_model(
        inputs_embeds=embeds[None],
        position_ids=positions,
        attention_mask=torch.zeros(()).where(visible, float("-inf"))[None, None],
        routes=llm.routes(ids, parts),
    ).last_hidden_state[0]
    return llm.head(hidden, torch.tensor([len(ids) - 1]))[0]


@torch.inference_mode()
def spoken(given: Prompt, count: int) -> list[int]:
    """The greedy answer, its first token included, which is always the same."""
    found = [token_id(BOS)]
    while len(found) < count:
        found.append(int(logits(given, found).argmax()))
    return found


def settings(case: Case) -> FlowSettings:
    options = case.options
    low, high = options.get("cfg_interval", (0.4, 1.0))
    return FlowSettings(
        num_timesteps=options["num_timesteps"],
        timestep_shift=3.0,
        text_scale=options["cfg_text_scale"],
        img_scale=options["cfg_img_scale"],
        interval=(low, high),
        renorm=options.get("cfg_renorm_type", "global"),
        renorm_min=options.get("cfg_renorm_min", 0.0),
    )


@torch.inference_mode()
def drawn(case: Case, llm: BagelLM | None = None) -> torch.Tensor:
    """The latents of a case, by the flow over a naive engine."""
    thought = list[int]()
    if case.options.get("think"):
        said = published()["draw_think.token_ids"]
        text = tokenizer().decode(said.tolist(), skip_special_tokens=False).split(BOS)[1]
        thought = text_ids(text)
    given = prompt(case, thought)
    height, width = case.options.get("image_shapes", (512, 512))
    asked = FlowRequest(spans=given.spans, flow=settings(case), width=width, height=height)
    inputs = {"token_ids": torch.tensor(given.ids), "embeds": given.rows}
    llm = llm or node("LLM")
    found = DensePasses(llm).run(start_flow(llm, inputs, msgspec.to_builtins(asked), seed=SEED))
    assert isinstance(found, dict)
    latents: torch.Tensor = found["latents"]
    return latents


def error(name: str, latents: torch.Tensor) -> float:
    """The largest difference to the recorded latents of a case."""
    recorded = torch.from_numpy(published()[f"{name}.latents"])
    return float((latents[:: CASES[name].every] - recorded).abs().max())


@pytest.mark.parametrize("name", ["text", "image_text"])
def test_the_text_of_a_greedy_answer_is_that_of_the_published_code(name: str) -> None:
    recorded = published()[f"{name}.token_ids"].tolist()
    assert spoken(prompt(CASES[name]), len(recorded)) == recorded
    assert len(set(recorded)) > 6, "the answer varies"


def test_a_thought_is_that_of_the_published_code() -> None:
    recorded = published()["draw_think.token_ids"].tolist()
    assert spoken(prompt(CASES["draw_think"]), len(recorded)) == recorded


@pytest.mark.parametrize("name", ["draw", "draw_plain", "draw_channel", "draw_text_channel", "draw_think"])
def test_latents_and_pixels_of_a_drawing_are_those_of_the_published_code(name: str) -> None:
    latents = drawn(CASES[name])
    assert error(name, latents) < 1e-4
    image = outputs("vae_decoder", item({"latents": latents}, width=48, height=64))["image"]
    difference = image.int() - torch.from_numpy(published()[f"{name}.pixels"]).int()
    assert difference.abs().max() <= 1, "a pixel is cut off at a whole number"
    assert (difference != 0).float().mean() < 0.01


def test_latents_of_an_edited_image_are_those_of_the_published_code() -> None:
    assert error("edit", drawn(CASES["edit"])) < 1e-3


# ---- negative controls: what the recordings would notice -------------------------------------------


class _SwappedRoutes(DensePasses):
    """An engine that computes latents as text, and text as latents."""

    def _compute(self, tokens: Any) -> torch.Tensor:
        tokens.routes = [1 - route for route in tokens.routes]
        found = super()._compute(tokens)
        tokens.routes = [1 - route for route in tokens.routes]
        return found


class _Causal(DensePasses):
    """An engine whose images see only what is before each of their tokens."""

    def _compute(self, tokens: Any) -> torch.Tensor:
        tokens.sees = [place + 1 for place in range(len(tokens.sees))]
        return super()._compute(tokens)


class _CountedPositions(DensePasses):
    """An engine in which each token of an image has a position of its own."""

    def _compute(self, tokens: Any) -> torch.Tensor:
        tokens.positions = list(range(len(tokens.positions)))
        return super()._compute(tokens)


@pytest.mark.parametrize("engine", [_SwappedRoutes, _Causal, _CountedPositions])
def test_a_wrong_engine_draws_something_else(
    engine: type[DensePasses], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "DensePasses", engine)
    assert error("draw", drawn(CASES["draw"])) > 0.05


def test_guidance_and_thoughts_change_the_drawing() -> None:
    recorded = published()
    for other in ("draw_plain", "draw_channel", "draw_think"):
        assert np.abs(recorded["draw.latents"] - recorded[f"{other}.latents"]).max() > 0.1


def test_an_image_changes_the_answer() -> None:
    case = CASES["image_text"]
    without = Case(inputs=case.inputs[1:], options=case.options)
    assert spoken(prompt(without), 6) != published()["image_text.token_ids"][:6].tolist()


def test_latents_of_a_prompt_go_through_the_other_weights() -> None:
    spans, _ = image_rows(is_edit=True)
    ids = [0] * sum(span.tokens for span in spans)
    routes = node("LLM").routes(ids, parts_of(spans, seed=SEED))
    inner = spans[0].tokens - 2
    assert routes.tolist() == [0, *([1] * inner), 0, *([0] * spans[1].tokens)]
    assert parts_of(spans, seed=SEED)[0].modality == LATENTS
