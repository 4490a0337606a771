"""Steps with prompts, replayed, give what unrecorded steps give; here over a kernel in plain torch."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.gpu.test_cuda_graphs import answers, specs
from tests.workers.kv_engine.oracle import run_all
from tests.workers.kv_engine.recorder import Again
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.cuda_graphs import Replay
from workers.kv_engine.gpu.prompt_graphs import token_sizes
from workers.kv_engine.outputs import PromptOutput
from workers.kv_engine.sequence import Sequence
from workers.kv_engine.sequence_spec import Pooling, PoolingMode, SequenceSpec
from workers.kv_engine.step import Step


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: Step,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The definition of causal attention, which reads the step's tensors alone, as a kernel on a GPU."""
    assert window is None
    assert softcap is None
    out = torch.zeros_like(queries)
    group, size = queries.shape[1] // keys.shape[1], step.spans.block_size
    for span, (begin, end) in enumerate(zip(step.query_offsets, step.query_offsets[1:], strict=False)):
        length = int(step.kv_lengths[span])
        if begin == end or not length:
            continue
        places = torch.arange(length)
        cells = step.block_table[step.rows[span], places // size].long() * size + places % size
        k, v = (of[cells].repeat_interleave(group, 1) for of in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries[begin:end], k) * (scaling or queries.shape[-1] ** -0.5)
        seen = places <= torch.arange(length - int(end - begin), length)[:, None]
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return out


class Counted(Again):
    """Counts the replays of steps with prompts, by their number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[int, int] = {}

    def capture(self, compute: Callable[[], None]) -> Replay:
        replay = super().capture(compute)
        if compute.func.__name__ != "_run":  # type: ignore[attr-defined] # a partial
            return replay
        return partial(self._count, compute.args[0], replay)  # type: ignore[attr-defined]

    def _count(self, size: int, replay: Replay) -> None:
        self.prompts[size] = self.prompts.get(size, 0) + 1
        replay()


def engine(node: DecoderLM, capture: Again | None = None, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 40, "max_sequences": 6}
    return make_engine(node, **(sizes | changes), capture=capture, kernel=attend)


def test_sizes_are_close_for_large_steps() -> None:
    assert token_sizes(4096) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert token_sizes(100) == [16, 32, 64]
    assert token_sizes(8) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1, 3])
def test_tokens_are_the_same_whoever_arrives_when(qwen3: DecoderLM, every: int) -> None:
    counted = Counted()
    recorded = engine(qwen3, counted)

    found = answers(run_all(recorded, specs(18), every=every))

    assert found == answers(run_all(engine(qwen3), specs(18), every=every))
    assert set(counted.prompts) == {16, 32}
    assert sum(counted.prompts.values()) > 3


@pytest.mark.slow
def test_as_many_spans_as_tokens_of_a_recording_are_no_step_of_decodes(qwen3: DecoderLM) -> None:
    """Fifteen sequences and the padding would be sixteen spans of sixteen tokens."""
    counted = Counted()

    found = answers(run_all(engine(qwen3, counted, max_sequences=15, num_blocks=128), specs(15), every=1))

    assert found == answers(run_all(engine(qwen3, max_sequences=15, num_blocks=128), specs(15), every=1))
    assert counted.prompts[16] > 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", PoolingMode)
def test_states_of_a_prompt_are_kept_while_later_steps_are_replayed(
    qwen3: DecoderLM, mode: PoolingMode
) -> None:
    """The prompt takes three steps, and other prompts share them."""
    text = list(range(5, 95))
    pooled = SequenceSpec(key="a", prompt_ids=text, max_tokens=0, pooling=Pooling(mode=mode))
    beside = [replace(pooled, key=str(n), prompt_ids=text[n:]) for n in range(3)]
    counted = Counted()

    found, expected = (
        run_all(engine(qwen3, capture, max_step_tokens=32), [pooled, *beside]) for capture in (counted, None)
    )

    for key, outputs in expected.items():
        made = [vector_of(of[-1]) for of in (found[key], outputs)]
        assert np.abs(made[0] - made[1]).max() < 1e-4 * np.abs(made[1]).max()
    assert counted.prompts[32] > 5


class Known:
    """Drafts the answers, with every third token wrong."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers = answers

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[list[int]]:
        found = []
        for sequence, count in zip(sequences, most, strict=True):
            begin = sequence.generated
            rest = self._answers[sequence.spec.key][begin : begin + count]
            found.append([token if (begin + n) % 3 else token - 1 for n, token in enumerate(rest)])
        return found

    def forget(self, key: str) -> None:
        pass


@pytest.mark.slow
def test_drafts_are_checked_in_replayed_steps(qwen3: DecoderLM) -> None:
    counted, wishes = Counted(), specs(6)
    expected = answers(run_all(engine(qwen3), wishes))
    drafting = engine(qwen3, counted, proposer=Known(expected), speculative_tokens=4)

    assert answers(run_all(drafting, wishes)) == expected
    assert sum(counted.prompts.values()) > 3
    assert drafting.stats().cache.accepted > 0


def vector_of(output: object) -> np.ndarray:
    assert isinstance(output, PromptOutput)
    assert output.vector is not None
    return np.asarray(output.vector.data).view("<f4")
