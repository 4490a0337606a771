"""Embeddings equal transformers' pooled states: in chunks, in batches, and after a preemption."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.decoder_lm.nodes import DecoderLM
from tests.tiny import tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, PromptOutput, StepFailedError
from workers.kv_engine.sequence_spec import FinishReason, Pooling, PoolingMode, SequenceSpec

Floats = npt.NDArray[np.float32]
TOLERANCE = 1e-5
MODES = list(PoolingMode)


@pytest.fixture(scope="module")
def states() -> Callable[[list[int]], Floats]:
    """Transformers' own last hidden states of a text: (T, hidden)."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3"), dtype=torch.float32)

    @torch.inference_mode()
    def of(ids: list[int]) -> Floats:
        found: Floats = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
        return found

    return of


def pooled(states: Floats, mode: PoolingMode) -> Floats:
    places = np.arange(1, len(states) + 1, dtype=np.float32)[:, None]
    match mode:
        case PoolingMode.FIRST:
            return np.asarray(states[0])
        case PoolingMode.LAST:
            return np.asarray(states[-1])
        case PoolingMode.MAX:
            return np.asarray(states.max(axis=0))
        case PoolingMode.MEAN_SQRT:
            return np.asarray(states.sum(axis=0) / np.sqrt(len(states)))
        case PoolingMode.MEAN:
            return np.asarray(states.mean(axis=0))
        case PoolingMode.WEIGHTED_MEAN:
            return np.asarray((states * places).sum(axis=0) / places.sum())
        case PoolingMode.NONE:
            return states


def text(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 500, length).tolist()
    return ids


def engine(qwen3: DecoderLM, *, num_blocks: int = 256, max_step_tokens: int = 16, **how: Any) -> KVEngine:
    return make_engine(
        qwen3, num_blocks=num_blocks, block_size=4, max_step_tokens=max_step_tokens, max_sequences=16, **how
    )


def spec(key: str, ids: list[int], pooling: Pooling) -> SequenceSpec:
    return SequenceSpec(key=key, prompt_ids=ids, max_tokens=0, pooling=pooling)


def run(engine: KVEngine, *specs: SequenceSpec) -> dict[str, PromptOutput]:
    for one in specs:
        engine.add(one)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return {output.key: output for output in outputs if isinstance(output, PromptOutput)}


def vector(output: PromptOutput) -> Floats:
    assert output.vector is not None
    assert output.finish is FinishReason.LENGTH
    assert output.vector.dtype == "float32"
    found: Floats = output.vector.data.view("<f4").reshape(output.vector.shape)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 15, 16, 47])
def test_a_prompt_in_pieces_gives_what_transformers_states_give(
    qwen3: DecoderLM, states: Callable[[list[int]], Floats], mode: PoolingMode, length: int
) -> None:
    ids = text(length, length)

    found = vector(run(engine(qwen3), spec("a", ids, Pooling(mode=mode)))["a"])

    assert found == pytest.approx(pooled(states(ids), mode), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_same_among_31_others_and_when_asked_again(
    qwen3: DecoderLM, states: Callable[[list[int]], Floats], mode: PoolingMode
) -> None:
    """The second time its keys and values are cached, and every state still counts, once."""
    shared = text(0, 21)
    texts = {str(number): shared + text(number, 1 + 3 * number) for number in range(32)}
    served = engine(qwen3, num_blocks=1024, max_step_tokens=64)
    answered = SequenceSpec(key="answered", prompt_ids=shared, max_tokens=9, ignore_eos=True)

    first = run(served, answered, *(spec(key, ids, Pooling(mode=mode)) for key, ids in texts.items()))
    again = run(served, *(spec(key, ids, Pooling(mode=mode)) for key, ids in texts.items()))

    for key, ids in texts.items():
        expected = pytest.approx(pooled(states(ids), mode), abs=TOLERANCE)
        assert vector(first[key]) == expected
        assert vector(again[key]) == expected
    hits = served.stats().cache.hits
    assert hits > 0 if mode is PoolingMode.LAST else hits == 0


@pytest.mark.parametrize("mode", MODES)
def test_states_count_once_where_a_sequence_is_preempted(
    qwen3: DecoderLM, states: Callable[[list[int]], Floats], mode: PoolingMode
) -> None:
    ids = text(7, 40)
    served = engine(qwen3, num_blocks=16, max_step_tokens=16, decode_slowdown_limit=None)
    served.add(SequenceSpec(key="first", prompt_ids=text(1, 20), max_tokens=40, ignore_eos=True))
    served.step()
    served.step()

    found = run(served, spec("a", ids, Pooling(mode=mode)))

    assert vector(found["a"]) == pytest.approx(pooled(states(ids), mode), abs=TOLERANCE)


def test_a_pool_takes_each_state_once(qwen3: DecoderLM, states: Callable[[list[int]], Floats]) -> None:
    """A sequence that is unseated halfway is computed again from its beginning."""
    ids = text(9, 30)
    served = engine(qwen3, max_step_tokens=16)
    served.add(spec("a", ids, Pooling(mode=PoolingMode.MEAN)))
    served.step()
    scheduler = served._scheduler  # no request can choose when it is preempted
    scheduler._preempt(scheduler.running[0], by=scheduler.running[0])

    assert vector(run(served)["a"]) == pytest.approx(pooled(states(ids), PoolingMode.MEAN), abs=TOLERANCE)
    assert served.stats().cache.preemptions == 1


def test_a_part_is_taken_before_it_is_brought_to_length_1(
    qwen3: DecoderLM, states: Callable[[list[int]], Floats]
) -> None:
    ids = text(3, 12)
    whole = pooled(states(ids), PoolingMode.LAST)
    served = engine(qwen3)

    found = run(
        served,
        spec("whole", ids, Pooling(mode=PoolingMode.LAST, normalize=True)),
        spec("part", ids, Pooling(mode=PoolingMode.LAST, normalize=True, dimensions=8)),
        spec("plain", ids, Pooling(mode=PoolingMode.LAST, dimensions=8)),
    )

    assert vector(found["whole"]) == pytest.approx(whole / np.linalg.norm(whole), abs=TOLERANCE)
    assert vector(found["part"]) == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=TOLERANCE)
    assert vector(found["plain"]) == pytest.approx(whole[:8], abs=TOLERANCE)


def test_states_that_are_no_numbers_fail_their_sequence_alone(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, forward = engine(qwen3), qwen3.forward

    def damaged(inputs: torch.Tensor, step: Any) -> torch.Tensor:
        hidden = forward(inputs, step)
        hidden[-1] = torch.nan
        return hidden

    monkeypatch.setattr(qwen3, "forward", damaged)
    served.add(spec("good", text(1, 5), Pooling(mode=PoolingMode.MEAN)))
    served.add(spec("bad", text(2, 5), Pooling(mode=PoolingMode.MEAN)))
    with pytest.raises(StepFailedError) as raised:
        served.step()

    assert raised.value.keys == ("bad",)
    assert [output.key for output in raised.value.outputs] == ["good"]
    assert not served.has_work


def test_a_prompt_is_kept_for_others_and_says_how_much_of_it(qwen3: DecoderLM) -> None:
    served, ids = engine(qwen3), text(5, 23)

    found = run(served, SequenceSpec(key="warm", prompt_ids=ids, max_tokens=0, caches_prompt=True))
    run(served, SequenceSpec(key="asked", prompt_ids=[*ids, 7], max_tokens=1))

    assert found["warm"].cached_tokens == 20
    assert served.stats().cache.hits == 20


def test_without_a_cache_nothing_is_kept(qwen3: DecoderLM) -> None:
    served = engine(qwen3, prefix_cache=False)

    found = run(served, SequenceSpec(key="warm", prompt_ids=text(5, 23), max_tokens=0, caches_prompt=True))

    assert found["warm"].cached_tokens == 0
