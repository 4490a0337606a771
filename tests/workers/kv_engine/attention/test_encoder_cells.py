"""Texts behind an encoder's frames: both attentions against torch's, over plain keys and values."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from models.base import KVLayout
from models.programs import FRAME_ROUTE
from workers.kv_engine.attention.paged import attention_context, frames_attention, paged_attention
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import Step, StepBuilder

FRAMES: Final = 6  # not a multiple of the block size
FEWER: Final = 3
BLOCK: Final = 4
HEADS, DIM = 2, 8
LAYER: Any = SimpleNamespace(layer_idx=0)


@dataclass
class _World:
    """A pool, and what its sequences have written.

    Attributes:
        cells: keys and values by sequence, (heads, cells, dim).
        frames: the number of frames by sequence.
    """

    pool: PagedPool
    builder: StepBuilder
    cells: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    frames: dict[str, int] = field(default_factory=dict)

    def run(self, *spans: Span, frames: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor, Step]:
        """Compute random queries, keys and values of spans; those at `frames` are of an encoder."""
        step = self.builder.build(spans)
        routes, positions = torch.zeros(len(step.token_ids), dtype=torch.int8), step.positions.clone()
        for place, span in enumerate(spans):
            here = slice(*step.spans.query_offsets[place : place + 2].tolist())
            if place in frames:
                routes[here] = FRAME_ROUTE
                self.frames[span.sequence.spec.key] = span.count
            else:
                positions[here] -= self.frames.get(span.sequence.spec.key, 0)
        step = replace(step, routes=routes if frames else None, positions=positions)
        tokens = len(step.token_ids)
        query, key, value = (torch.randn(1, HEADS, tokens, DIM) for _ in range(3))
        offsets = step.spans.query_offsets.tolist()
        for span, first, stop in zip(spans, offsets, offsets[1:], strict=False):
            name = span.sequence.spec.key
            old = self.cells.get(name, (torch.zeros(HEADS, 0, DIM),) * 2)
            new = tuple(one[0, :, first:stop] for one in (key, value))
            self.cells[name] = tuple(  # type: ignore[assignment]
                torch.cat([a[:, : span.start], b], dim=1) for a, b in zip(old, new, strict=True)
            )
        with attention_context(self.pool, step):
            own, _ = paged_attention(LAYER, query, key, value, None, scaling=1.0, after_frames=True)
            crossed, _ = frames_attention(LAYER, query, scaling=1.0)
        return own[0], crossed[0], replace(step, row_values=query[0].transpose(0, 1))

    def expected(
        self, step: Step, place: int, span: Span, *, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both attentions of a span of text, whose own cells begin at `first`."""
        keys, values = self.cells[span.sequence.spec.key]
        offsets = step.spans.query_offsets
        assert step.row_values is not None
        query = step.row_values[offsets[place] : offsets[place + 1]].transpose(0, 1)
        visible = torch.ones(span.count, keys.shape[1] - first).tril(span.start - first).bool()
        own = scaled_dot_product_attention(query, keys[:, first:], values[:, first:], visible, scale=1.0)
        crossed = scaled_dot_product_attention(query, keys[:, :first], values[:, :first], scale=1.0)
        return own.transpose(0, 1), crossed.transpose(0, 1)


@pytest.fixture
def world() -> _World:
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    pool = PagedPool(
        KVLayout(layers=1, kv_heads=HEADS, head_dim=DIM), slots=64, device=cpu, dtype=torch.float32
    )
    builder = StepBuilder(max_sequences=4, max_step_tokens=64, max_blocks=4, block_size=BLOCK, device=cpu)
    return _World(pool, builder)


def sequence(name: str, row: int, tokens: int) -> Sequence:
    found = Sequence(SequenceSpec(key=name, prompt_ids=[1] * tokens, max_tokens=1))
    found.blocks, found.row = [row * 4 + n for n in (2, 0, 3, 1)], row
    return found


@pytest.mark.parametrize("fewer", [FRAMES, FEWER])
def test_texts_attend_to_their_own_cells_and_to_their_frames(world: _World, fewer: int) -> None:
    one, other = sequence("one", 0, 16), sequence("other", 1, 16)
    world.run(Span(one, 0, FRAMES), Span(other, 0, fewer), frames=(0, 1))
    prompts = Span(one, FRAMES, 3), Span(other, fewer, 1)
    for spans in (prompts, (Span(one, FRAMES + 3, 1), Span(other, fewer + 1, 1))):
        own, crossed, step = world.run(*spans)
        for place, (span, first) in enumerate(zip(spans, (FRAMES, fewer), strict=True)):
            here = slice(*step.spans.query_offsets[place : place + 2].tolist())
            wanted = world.expected(step, place, span, first=first)
            torch.testing.assert_close((own[here], crossed[here]), wanted)


def test_frames_of_one_beside_the_text_of_another(world: _World) -> None:
    one, other = sequence("one", 0, 16), sequence("other", 1, 16)
    world.run(Span(one, 0, FRAMES), frames=(0,))
    spans = Span(one, FRAMES, 4), Span(other, 0, FRAMES)
    own, crossed, step = world.run(*spans, frames=(1,))
    wanted = world.expected(step, 0, spans[0], first=FRAMES)
    torch.testing.assert_close((own[:4], crossed[:4]), wanted)
    assert not own[4:].any(), "frames are written, and do not attend"
    assert not crossed[4:].any()


def test_a_text_without_frames_hears_nothing(world: _World) -> None:
    one = sequence("one", 0, 16)
    own, crossed, step = world.run(Span(one, 0, 5))
    torch.testing.assert_close(own, world.expected(step, 0, Span(one, 0, 5), first=0)[0])
    assert not crossed.any()


def test_another_number_of_frames_would_be_seen(world: _World) -> None:
    """Negative control."""
    one = sequence("one", 0, 16)
    world.run(Span(one, 0, FRAMES), frames=(0,))
    span = Span(one, FRAMES, 3)
    own, crossed, step = world.run(span)
    for found, wanted in zip((own, crossed), world.expected(step, 0, span, first=FRAMES - 1), strict=True):
        assert (found - wanted).abs().max() > 0.01
