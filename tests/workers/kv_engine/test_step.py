from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

from models.sequence_request import PromptPart
from shared.errors import BugError
from workers.kv_engine import step as step_module
from workers.kv_engine.prompt_parts import PromptParts
from workers.kv_engine.sampling.sampling_state import UnreadTokens
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.kv_engine.step import StepBuilder

CPU = torch.device("cpu")


def builder() -> StepBuilder:
    return StepBuilder(max_sequences=4, max_step_tokens=32, max_blocks=5, block_size=4, device=CPU)


def seated(
    key: str, prompt: list[int], blocks: list[int], row: int, sampling: Sampling | None = None
) -> Sequence:
    spec = SequenceSpec(key=key, prompt_ids=prompt, max_tokens=3, sampling=sampling or Sampling())
    sequence = Sequence(spec)
    sequence.blocks, sequence.row = blocks, row
    return sequence


def test_a_step_has_the_position_and_the_slot_of_every_token() -> None:
    prefill = seated("a", list(range(100, 110)), [7, 2, 5], row=2)
    decode = seated("b", [40, 41, 42], [9, 1], row=0)

    step = builder().build([Span(decode, 2, 1), Span(prefill, 3, 4)])

    assert step.token_ids.tolist() == [42, 103, 104, 105, 106]
    assert step.positions.tolist() == [2, 3, 4, 5, 6]
    assert step.slots.tolist() == [9 * 4 + 2, 7 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2]
    assert step.query_offsets.tolist() == [0, 1, 5]
    assert step.kv_lengths.tolist() == [3, 7]
    assert step.rows.tolist() == [0, 2]
    assert step.block_table[2].tolist() == [7, 2, 5, 0, 0]
    assert step.logit_indices.tolist() == [0]
    assert {t.dtype for t in (step.token_ids, step.positions, step.slots, step.block_table)} == {torch.int32}


class _WithMemoryOfItsOwn(step_module._MirroredBuffer):
    """The mirror of a GPU, on a CPU.

    Attributes:
        uploads: how often the whole buffer was copied.
    """

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        super().__init__(sizes, device)
        self._device = self._host.clone()
        parts: Any = torch.split(self._device, list(sizes.values()))
        self.device.update(zip(sizes, parts, strict=True))
        self.uploads = 0

    def upload(self) -> None:
        self._device.copy_(self._host)
        self.uploads += 1


def test_of_the_block_table_only_changes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "_MirroredBuffer", _WithMemoryOfItsOwn)
    on_gpu = StepBuilder(max_sequences=4, max_step_tokens=32, max_blocks=5, block_size=4, device=CPU)
    table: Any = on_gpu._table
    first, second = seated("a", [1] * 9, [7, 2, 5], row=2), seated("b", [1] * 3, [3], row=0)

    def built() -> list[list[int]]:
        rows: list[list[int]] = on_gpu.build([Span(first, 8, 1), Span(second, 2, 1)]).block_table.tolist()
        return rows

    found = built()
    assert (found[2][:3], found[0][:1]) == ([7, 2, 5], [3])
    second.blocks.append(6)
    first.blocks.append(1)
    found = built()
    assert (found[2][:4], found[0][:2]) == ([7, 2, 5, 1], [3, 6])
    second.blocks.pop()  # as if a draft was refused, and the block went to another sequence
    assert built() == found
    second.blocks.append(8)
    assert built()[0][:2] == [3, 8]
    second = seated("c", [1] * 3, [4], row=0)
    assert built()[0][0] == 4
    assert table.uploads == 0


def test_many_changes_of_the_block_table_are_copied_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "_MirroredBuffer", _WithMemoryOfItsOwn)
    on_gpu = StepBuilder(max_sequences=2, max_step_tokens=32, max_blocks=1100, block_size=4, device=CPU)
    table: Any = on_gpu._table
    long = seated("a", [1] * 4100, list(range(1025)), row=1)

    found = on_gpu.build([Span(long, 4099, 1)]).block_table

    assert found[1, :1025].tolist() == list(range(1025))
    assert table.uploads == 1
    long.blocks.append(1030)
    assert on_gpu.build([Span(long, 4099, 1)]).block_table[1, 1025] == 1030
    assert table.uploads == 1


def test_the_buffers_stay_where_they_are() -> None:
    fixed = builder()
    sequence = seated("a", [1, 2, 3, 4, 5], [0, 1], row=0)

    def addresses(count: int) -> list[int]:
        step = fixed.build([Span(sequence, 0, count)])
        return [t.data_ptr() for t in (step.token_ids, step.positions, step.slots, step.block_table)]

    assert addresses(5) == addresses(2)


def test_a_recorded_step_with_prompts_has_empty_spans_and_its_padding_last() -> None:
    fixed = StepBuilder(
        max_sequences=4, max_step_tokens=32, max_blocks=5, block_size=4, device=CPU, padding_block=20
    )
    prefill, decode = seated("a", list(range(100, 110)), [7, 2, 5], row=2), seated("b", [40, 41], [9], row=0)

    step = fixed.build([Span(decode, 1, 1), Span(prefill, 3, 4)], tokens=8)
    recorded = fixed.captured_prompt(8)

    assert (step.token_ids.tolist(), step.rows.tolist()) == ([41, 103, 104, 105, 106], [0, 2])
    assert recorded.token_ids.tolist() == [41, 103, 104, 105, 106, 0, 0, 0]
    assert recorded.slots.tolist()[5:] == [20 * 4] * 3
    assert recorded.positions.tolist()[5:] == [0] * 3
    assert recorded.query_offsets.tolist() == [0, 1, 5, 5, 5, 8]
    assert recorded.kv_lengths.tolist() == [2, 7, 0, 0, 0]
    assert recorded.rows.tolist() == [0, 2, 4, 4, 4]
    assert not recorded.logit_indices.numel()


def test_a_recorded_step_with_prompts_never_has_as_many_spans_as_tokens() -> None:
    """Kernels take such a step for one of decodes."""
    fixed = StepBuilder(
        max_sequences=15, max_step_tokens=32, max_blocks=5, block_size=4, device=CPU, padding_block=20
    )
    fixed.build([], tokens=16)

    assert len(fixed.captured_prompt(16).rows) == 17
    assert fixed.captured_prompt(16).query_offsets.tolist() == [0] * 17 + [16]
    assert len(fixed.captured_prompt(32).rows) == 16


def test_padding_fills_a_captured_step_with_spans_in_an_unused_cell() -> None:
    sizes: dict[str, Any] = {"max_sequences": 4, "max_step_tokens": 32, "max_blocks": 5, "block_size": 4}
    fixed = StepBuilder(**sizes, device=CPU, padding_block=20)
    captured = fixed.captured(4)
    decode = seated("b", [40, 41, 42], [9, 1], row=2, sampling=Sampling(temperature=1, top_k=7))

    fixed.build([Span(seated("a", list(range(9)), [3, 4, 5], row=0), 0, 9)])
    step = fixed.build([Span(decode, 2, 1)], rows=4)

    assert captured.token_ids.tolist() == [42, 0, 0, 0]
    assert captured.positions.tolist() == [2, 0, 0, 0]
    assert captured.slots.tolist() == [9 * 4 + 2, 80, 80, 80]
    assert captured.rows.tolist() == [2, 4, 4, 4]
    assert captured.kv_lengths.tolist() == [3, 1, 1, 1]
    assert captured.query_offsets.tolist() == [0, 1, 2, 3, 4]
    assert captured.logit_indices.tolist() == [0, 1, 2, 3]
    assert captured.block_table[4, 0] == 20
    assert captured.sampling.top_k[0] == 7
    assert step.logit_indices.tolist() == [0]
    assert len(step.sampling.top_k) == 1


def test_unread_tokens_are_taken_on_the_device() -> None:
    """Of three sampled sequences the second has left, and the third has no valid token."""
    fixed = StepBuilder(
        max_sequences=4, max_step_tokens=32, max_blocks=5, block_size=4, device=CPU, padding_block=20
    )
    one, other = seated("a", [40, 41, 999], [9], row=2), seated("b", [1, 999], [3], row=0)
    sampled = torch.tensor([77, 88, -1])

    step = fixed.build(
        [Span(one, 2, 1), Span(other, 1, 1)], rows=4, unread=UnreadTokens(tokens=sampled, places=[0, 2])
    )

    assert step.token_ids.tolist() == [77, 0]
    assert fixed.captured(4).token_ids.tolist() == [77, 0, 0, 0]
    assert (step.positions.tolist(), step.slots.tolist()) == ([2, 1], [9 * 4 + 2, 3 * 4 + 1])
    assert sampled.tolist() == [77, 88, -1]


def test_a_captured_step_has_the_requested_kind_of_sampling() -> None:
    plain = builder().captured(2, is_random=True).sampling
    filtered = builder().captured(2, is_random=True, is_filtered=True).sampling

    assert (plain.is_random, plain.is_filtered) == (True, False)
    assert (filtered.has_top_k, filtered.has_top_p, filtered.has_min_p, filtered.candidates) == (
        True,
        True,
        True,
        None,
    )


def test_a_row_is_rewritten_when_another_sequence_takes_it() -> None:
    fixed = builder()
    fixed.build([Span(seated("a", [1], [4, 3, 2], row=1, sampling=Sampling(temperature=1, seed=5)), 0, 1)])

    step = fixed.build([Span(seated("b", [1], [1], row=1, sampling=Sampling(temperature=2, top_k=3)), 0, 1)])

    assert step.block_table[1].tolist() == [1, 0, 0, 0, 0]
    assert step.sampling.temperature.tolist() == [2.0]
    assert step.sampling.top_k.tolist() == [3]
    assert step.sampling.seed_low.tolist() == [0]


def test_seeds_of_64_bits_are_kept_whole() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    for seed in seeds:
        sequence = seated("a", [1], [0], row=0, sampling=Sampling(temperature=1, seed=seed))
        sampling = builder().build([Span(sequence, 0, 1)]).sampling
        low, high = (int(np.uint32(t.item() % 2**32)) for t in (sampling.seed_low, sampling.seed_high))
        assert (high << 32 | low) == seed % 2**64


def test_the_draw_index_counts_generated_tokens_and_the_prefix() -> None:
    spec = SequenceSpec(key="a", prompt_ids=[1, 2], prefix_ids=[3, 4, 5], max_tokens=9)
    sequence = Sequence(spec)
    sequence.blocks, sequence.row = [0, 1], 3

    assert builder().build([Span(sequence, 0, 5)]).sampling.draw_index.tolist() == [3]


def test_the_host_knows_which_work_the_sampler_can_leave_out() -> None:
    def mode(*samplings: Sampling) -> tuple[str, int | None]:
        spans = [Span(seated(str(i), [1], [i], row=i, sampling=s), 0, 1) for i, s in enumerate(samplings)]
        sampling = builder().build(spans).sampling
        has = {"k": sampling.has_top_k, "p": sampling.has_top_p, "m": sampling.has_min_p}
        assert sampling.is_filtered is any(has.values())
        return "r" * sampling.is_random + "".join(name for name, is_so in has.items() if is_so), (
            sampling.candidates
        )

    greedy, plain = Sampling(top_k=5, top_p=0.5, min_p=0.5), Sampling(temperature=1)
    narrow, wide = Sampling(temperature=1, top_k=20, top_p=0.9), Sampling(temperature=1, top_p=0.9)
    assert mode(greedy) == ("", None)
    assert mode(greedy, plain) == ("r", None)
    assert mode(greedy, plain, narrow) == ("rkp", 20)
    assert mode(narrow, wide) == ("rkp", None)
    assert mode(Sampling(temperature=1, min_p=0.1)) == ("rm", None)


# ---- prompts with media --------------------------------------------------------------------------------
def with_image(prompt: list[int], *, axes: int = 1, full: bool = False) -> Sequence:
    """Return a sequence with an image at its tokens 2 to 4, whose positions stand still."""
    sequence = seated("image", prompt, [3, 4], row=1)
    positions = np.array([[0, 1, 2, 2, 2, 3], [0, 1, 2, 2, 3, 3]], np.int32)[:axes]
    sequence.parts = PromptParts(
        prompt,
        [PromptPart(start=2, count=3, digest="aa", full=full)],
        positions=positions,
        next_position=4,
        rows=torch.arange(6.0).reshape(3, 2),
    )
    return sequence


def test_rows_and_positions_of_media_and_slots_of_their_tokens() -> None:
    plain, image = seated("a", [1, 2, 3], [7], row=0), with_image([10, 11, 12, 12, 12, 13])

    step = builder().build([Span(plain, 0, 3), Span(image, 1, 3)])

    assert step.positions.tolist() == [0, 1, 2, 1, 2, 2]
    assert step.slots.tolist() == [28, 29, 30, 13, 14, 15]
    assert step.row_values is not None
    assert step.row_indices is not None
    assert step.row_values.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert step.row_indices.tolist() == [4, 5]
    assert (step.key_ends, step.spans.key_ends) == (None, None)


def test_several_axes_are_rows_of_positions_also_in_a_padded_step() -> None:
    sizes: dict[str, Any] = {"max_sequences": 4, "max_step_tokens": 32, "max_blocks": 5, "block_size": 4}
    fixed = StepBuilder(**sizes, device=CPU, padding_block=20, position_axes=2)
    image = with_image([10, 11, 12, 12, 12, 13], axes=2)

    step = fixed.build([Span(seated("a", [1, 2], [7], row=0), 0, 2), Span(image, 2, 4)])
    assert step.positions.tolist() == [[0, 1, 2, 2, 2, 3], [0, 1, 2, 2, 3, 3]]
    image.ids += [40, 41]
    captured = fixed.captured(3)
    step = fixed.build([Span(image, 7, 1)], rows=3)

    assert captured.positions.tolist() == [[5, 0, 0], [5, 0, 0]]
    assert step.positions.tolist() == [[5], [5]]


def test_tokens_of_a_full_part_see_one_another_and_others_what_came_before() -> None:
    plain, image = seated("a", [1, 2, 3], [7], row=0), with_image([10, 11, 12, 12, 12, 13], full=True)

    step = builder().build([Span(plain, 1, 2), Span(image, 0, 6)])

    assert step.key_ends is not None
    assert step.key_ends.tolist() == [2, 3, 1, 2, 5, 5, 5, 6]
    assert step.spans.key_ends is not None
    assert step.spans.key_ends.tolist() == step.key_ends.tolist()
    assert builder().build([Span(image, 5, 1)]).key_ends is None


def test_rows_that_did_not_come_are_an_error_only_where_they_are_needed() -> None:
    image = with_image([10, 11, 12, 12, 12, 13])
    assert image.parts is not None
    image.parts.rows = None  # as on a rank that imports keys and values

    assert builder().build([Span(image, 5, 1)]).row_values is None
    with pytest.raises(BugError, match="the rows of its media are needed"):
        builder().build([Span(image, 4, 2)])


def test_a_builder_keeps_no_sequence_that_has_ended() -> None:
    fixed, image = builder(), with_image([10, 11, 12, 12, 12, 13])
    fixed.build([Span(image, 0, 6)])
    alive = ref(image)

    del image

    assert alive() is None
