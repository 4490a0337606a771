"""Prompts with images on the CPU kernels are computed as transformers' text models compute them.

The prompt has text, an image whose tokens see one another, and text; its image rows replace embeddings, are
added after layers, and have positions of three axes.
"""

import dataclasses
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
import torch

from models.checkpoints.files import UnsupportedArchitectureError
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.cpu_kernels.text_models import HIDDEN, TextNode
from tests.workers.cpu_kernels.text_models import NAMES as TEXT_MODELS
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.programs.flow import flow_node
from workers.cpu_kernels import decoder
from workers.cpu_kernels.decoder import NativeDecoder, use_cpu_kernels
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import StepBuilder

TOKENS: Final = 230
IMAGE: Final = range(70, 190)  # longer than a tile of keys and than the window
ADDED_LAYERS: Final = {"qwen3_vl": 2, "qwen3_vl_moe": 2}
WINDOWED: Final = {"qwen2_5_vl", "gemma3"}


class Prompt:
    """A prompt of `TOKENS` tokens with an image, for a text model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.added = ADDED_LAYERS.get(name, 0)
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(200, (TOKENS,), generator=generator)
        self.rows = torch.randn(len(IMAGE), HIDDEN * (1 + self.added), generator=generator)
        self.axes = TextNode(name).position_axes
        index = torch.arange(TOKENS, dtype=torch.int32)
        self.positions = index.repeat(self.axes, 1)
        if self.axes > 1:
            at = torch.arange(len(IMAGE), dtype=torch.int32)
            self.positions[:, IMAGE] = IMAGE.start + torch.stack([at * 0, at // 12, at % 12])
            self.positions[:, IMAGE.stop :] = index[IMAGE.stop :] - 100
        self.ends = index + 1
        self.ends[IMAGE] = IMAGE.stop
        self.starts = index.clone()
        self.starts[IMAGE] = IMAGE.start

    def visible(self, window: int | None) -> torch.Tensor:
        """True where a query (rows) sees a key (columns)."""
        index = torch.arange(TOKENS)
        first = torch.minimum(index - window + 1, self.starts) if window else torch.zeros(TOKENS)
        return (index[None] < self.ends[:, None]) & (index[None] >= first[:, None])

    def expected(self) -> torch.Tensor:
        """The states as the text model of transformers computes them in one pass, (T, hidden)."""
        node = TextNode(self.name)
        text = node.text_model
        embeds = text.embed_tokens(self.ids).clone()
        embeds[IMAGE] = self.rows[:, :HIDDEN]
        masks = {
            kind: torch.zeros(()).where(self.visible(window), float("-inf"))[None, None]
            for kind, window in (("full_attention", None), ("sliding_attention", 50))
        }
        given: dict[str, Any] = {
            "attention_mask": masks if self.name in WINDOWED else masks["full_attention"]
        }
        if self.added:
            is_image = torch.zeros(1, TOKENS, dtype=torch.bool)
            is_image[0, IMAGE] = True
            given |= {"visual_pos_masks": is_image}
            given |= {"deepstack_visual_embeds": list(self.rows[:, HIDDEN:].chunk(self.added, dim=1))}
        hidden: torch.Tensor = text(
            inputs_embeds=embeds[None],
            position_ids=self.positions[:, None] if self.axes > 1 else self.positions,
            use_cache=False,
            **given,
        ).last_hidden_state[0]
        return hidden

    def computed(self, node: Any, *cuts: int, others: int = 0) -> torch.Tensor:
        """The states over a pool of scattered blocks, span by span, next to other sequences."""
        pool = PagedPool.of(node, slots=60 * 16)
        builder = StepBuilder(
            max_sequences=4, max_step_tokens=512, max_blocks=20, block_size=16, device=torch.device("cpu")
        )
        text = _sequence("text", self.ids.tolist(), list(range(59, 29, -2)), 0)
        beside = [_sequence(f"{n}", [n, 2, 3], [n], n + 1) for n in range(others)]
        found = []
        for start, end in pairwise((0, *cuts, TOKENS)):
            step = builder.build([*(Span(one, 0, 3) for one in beside), Span(text, start, end - start)])
            found.append(self._run(node, pool, step, start, end, before=3 * others))
        return torch.cat(found)

    def _run(
        self, node: Any, pool: PagedPool, step: Any, start: int, end: int, *, before: int
    ) -> torch.Tensor:
        own = torch.arange(3, dtype=torch.int32).repeat(before // 3)
        step = dataclasses.replace(
            step,
            positions=torch.cat([own.repeat(self.axes, 1), self.positions[:, start:end]], 1),
            key_ends=torch.cat([own + 1, self.ends[start:end]]),
            full_starts=torch.cat([own, self.starts[start:end]]),
        )
        if self.axes == 1:
            step = dataclasses.replace(step, positions=step.positions[0])
        inputs: Any = node.embed(step.token_ids)
        image = [at for at in IMAGE if start <= at < end]
        if image:
            rows = self.rows[image[0] - IMAGE.start : image[-1] + 1 - IMAGE.start]
            inputs = node.splice(step.token_ids, rows, torch.tensor(image) - start + before)
        with attention_context(pool, step):
            hidden: torch.Tensor = node.forward(inputs, step)
        return hidden[before:]


def _sequence(key: str, ids: list[int], blocks: list[int], row: int) -> Sequence:
    sequence = Sequence(SequenceSpec(key=key, prompt_ids=ids, max_tokens=1))
    sequence.blocks, sequence.row = blocks, row
    return sequence


def _native(name: str, variant: str, *, threads: int = 2) -> NativeDecoder:
    node = TextNode(name, added_layers=ADDED_LAYERS.get(name, 0))
    return NativeDecoder(node, library(variant), threads=threads)


@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("name", TEXT_MODELS)
@torch.inference_mode()
def test_states_are_those_of_the_text_model(name: str, variant: str) -> None:
    prompt = Prompt(name)

    found = prompt.computed(_native(name, variant), 31, IMAGE.start, others=2)

    torch.testing.assert_close(found, prompt.expected(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", TEXT_MODELS)
@torch.inference_mode()
def test_a_mask_that_were_ignored_would_show(name: str) -> None:
    prompt = Prompt(name)
    prompt.ends = torch.arange(1, TOKENS + 1, dtype=torch.int32)

    found = prompt.computed(_native(name, NAMES[-1]))

    difference = (found - Prompt(name).expected()).abs().amax(1)
    assert float(difference[: IMAGE.start].max()) < 2e-4
    assert float(difference[IMAGE].max()) > 0.01


@pytest.mark.parametrize("variant", NAMES)
@torch.inference_mode()
def test_states_are_the_same_bits_however_the_text_around_an_image_is_cut(variant: str) -> None:
    prompt = Prompt("qwen3_vl")
    native = _native("qwen3_vl", variant, threads=3)

    whole = prompt.computed(native)
    cut = prompt.computed(_native("qwen3_vl", variant, threads=1), 9, IMAGE.start, IMAGE.stop + 7, others=3)

    assert np.array_equal(whole.numpy(), cut.numpy())


def test_a_text_model_is_found_inside_of_its_class() -> None:
    served = use_cpu_kernels(TextNode("qwen3_vl", added_layers=2), threads=1)

    assert isinstance(served, NativeDecoder)
    assert served.position_axes == 3
    assert served.embed_width == 3 * HIDDEN
    assert "full" in served.masks


def test_kernels_that_ignore_the_mask_are_found_out_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder._to_c_step

    def causal(step: Any, *rest: Any) -> Any:
        return right(dataclasses.replace(step, key_ends=None), *rest)

    monkeypatch.setattr(decoder, "_to_c_step", causal)
    native = NativeDecoder(flow_node(), library(NAMES[-1]), threads=1)

    with pytest.raises(UnsupportedArchitectureError, match="tokens that see later ones differ"):
        make_engine(native, num_blocks=20, block_size=8, max_step_tokens=64, max_sequences=4)
