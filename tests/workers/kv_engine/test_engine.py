"""The guarantees of the engine to its callers, on a real model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from shared.errors import BugError, ClientError
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, prompts, run, tokens
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, StepFailedError
from workers.kv_engine.sequence_spec import FinishReason, Sampling, SequenceSpec
from workers.machine.gpu_context import DeviceLostError

SAMPLED = Sampling(temperature=1.2, top_k=50, top_p=0.95, seed=11)


def engine(node: DecoderLM, **changes: int) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 24, "max_sequences": 8}
    return make_engine(node, **(sizes | changes))


def spec(key: str = "a", **changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {"key": key, "prompt_ids": [5, 6, 7, 8], "max_tokens": 12}
    return SequenceSpec(**(values | changes))


def many(count: int, **changes: Any) -> list[SequenceSpec]:
    return [
        spec(str(i), prompt_ids=text, sampling=replace(SAMPLED, seed=i) if i % 2 else Sampling(), **changes)
        for i, text in enumerate(prompts(count, seed=7))
    ]


@pytest.mark.slow
def test_64_concurrent_requests_answer_as_each_does_alone(qwen3: DecoderLM) -> None:
    requests = many(64)
    alone = {request.key: ids(run(engine(qwen3), [request])[request.key]) for request in requests}

    together = run(engine(qwen3, num_blocks=500, max_sequences=64, max_step_tokens=100), requests)

    assert {key: ids(outputs) for key, outputs in together.items()} == alone
    assert len({tuple(answer) for answer in alone.values()}) == 64


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_a_random_request_draws_the_same_alone_and_among_31_others(
    qwen3: DecoderLM, sampling: Sampling
) -> None:
    mine = spec("mine", sampling=sampling)
    others = many(31)

    alone = run(engine(qwen3), [mine])
    among = run(
        engine(qwen3, num_blocks=300, max_sequences=32, max_step_tokens=64),
        [*others[:15], mine, *others[15:]],
    )

    assert ids(among["mine"]) == ids(alone["mine"])
    assert len(set(ids(alone["mine"]))) > 5


@pytest.mark.slow
def test_a_small_pool_queues_in_order_and_changes_no_token(qwen3: DecoderLM) -> None:
    requests = many(12)
    roomy = run(engine(qwen3), requests)
    tight = engine(qwen3, num_blocks=8)

    found = run(tight, requests)

    assert found.keys() == roomy.keys()
    assert [ids(found[r.key]) for r in requests] == [ids(roomy[r.key]) for r in requests]
    first_steps = [found[r.key][0].step for r in requests]
    assert first_steps == sorted(first_steps)
    assert tight.stats().kv_used == 0


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_resuming_with_a_prefix_continues_as_if_never_stopped(
    qwen3: DecoderLM, sampling: Sampling, cut: int
) -> None:
    whole = run(engine(qwen3), [spec(sampling=sampling)])["a"]

    rest = run(engine(qwen3), [spec(sampling=sampling, prefix_ids=ids(whole)[:cut])])["a"]

    assert [(o.token_id, o.index, o.finish) for o in rest] == [
        (o.token_id, o.index, o.finish) for o in whole[cut:]
    ]


def test_one_step_is_exactly_one_forward(qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = engine(qwen3, max_step_tokens=9)
    calls: list[int] = []
    forward = DecoderLM.forward

    def counted(self: DecoderLM, inputs: torch.Tensor, step: Any) -> torch.Tensor:
        calls.append(len(inputs))
        return forward(self, inputs, step)

    monkeypatch.setattr(DecoderLM, "forward", counted)
    for request in many(6):
        busy.add(request)
    steps = 0
    while busy.has_work:
        busy.step()
        steps += 1

    assert len(calls) == steps == busy.forwards
    assert max(calls) <= 9
    assert sum(calls) == sum(len(r.prompt_ids) + r.max_tokens - 1 for r in many(6))


def test_an_idle_engine_runs_nothing(qwen3: DecoderLM) -> None:
    idle = engine(qwen3)

    assert idle.step() == []
    assert idle.forwards == 0


def test_the_token_that_ends_the_answer_is_an_output(qwen3: DecoderLM) -> None:
    free = ids(run(engine(qwen3), [spec()])["a"])
    eos = frozenset({free[4]})
    assert free[4] not in free[:4]

    outputs = run(engine(qwen3), [spec(eos_ids=eos)])["a"]
    ignored = run(engine(qwen3), [spec(eos_ids=eos, ignore_eos=True)])["a"]

    assert ids(outputs) == free[:5]
    assert [o.finish for o in outputs] == [None] * 4 + [FinishReason.STOP]
    assert ids(ignored) == free
    assert ignored[-1].finish is FinishReason.LENGTH
    assert [o.index for o in ignored] == list(range(12))


def test_a_cancelled_sequence_leaves_at_once_and_the_others_are_unaffected(qwen3: DecoderLM) -> None:
    requests = many(3)
    undisturbed = run(engine(qwen3), requests)
    busy = engine(qwen3)
    for request in requests:
        busy.add(request)
    early = [output for _ in range(4) for output in busy.step()]

    assert busy.cancel("1")
    assert not busy.cancel("1")
    late = []
    while busy.has_work:
        late += busy.step()

    assert all(output.key != "1" for output in late)
    for key in ("0", "2"):
        assert ids(o for o in early + late if o.key == key) == ids(undisturbed[key])
    assert busy.stats().kv_used == 0


def test_a_queued_sequence_can_be_cancelled(qwen3: DecoderLM) -> None:
    narrow = engine(qwen3, max_sequences=1)
    narrow.add(spec("a"))
    narrow.add(spec("b"))
    narrow.step()

    assert narrow.cancel("b")
    assert (narrow.stats().running, narrow.stats().waiting) == (1, 0)


def test_a_sequence_that_was_held_answers_as_if_it_had_not_been(qwen3: DecoderLM) -> None:
    requests = many(3)
    undisturbed = run(engine(qwen3), requests)
    busy = engine(qwen3)
    for request in requests:
        busy.add(request)
    outputs = [output for _ in range(7) for output in busy.step()]

    assert busy.hold("1")
    outputs += drained(busy, without="1")
    held = busy.stats()
    assert busy.resume("1")
    outputs += drained(busy)

    assert {r.key: ids(o for o in outputs if o.key == r.key) for r in requests} == {
        key: ids(answer) for key, answer in undisturbed.items()
    }
    assert (held.running, held.held, held.kv_used > 0) == (1, 1, True)
    assert (busy.stats().held, busy.stats().kv_used) == (0, 0)


def drained(of: KVEngine, *, without: str | None = None) -> list[Output]:
    """Run all remaining steps, and return their outputs."""
    outputs: list[Output] = []
    while of.has_work:
        outputs += of.step()
        assert without not in of.step_keys
    return outputs


def test_a_held_sequence_can_be_cancelled(qwen3: DecoderLM) -> None:
    busy = engine(qwen3)
    busy.add(spec())
    busy.step()
    busy.hold("a")

    assert busy.cancel("a")

    assert (busy.has_work, busy.stats().running, busy.stats().kv_used) == (False, 0, 0)
    assert not busy.hold("a")
    assert not busy.resume("a")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt_ids": []}, "empty_prompt"),
        ({"prompt_ids": [1, 512]}, "invalid_token_id"),
        ({"prompt_ids": [-1]}, "invalid_token_id"),
        ({"prefix_ids": [99999]}, "invalid_token_id"),
        ({"max_tokens": 0}, "invalid_max_tokens"),
        ({"max_tokens": 509}, "context_length_exceeded"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_changes_nothing(
    qwen3: DecoderLM, changes: dict[str, Any], code: str
) -> None:
    empty = engine(qwen3)

    with pytest.raises(ClientError) as caught:
        empty.add(spec(**changes))

    assert (caught.value.failure_code, caught.value.failure_status) == (code, 400)
    assert not empty.has_work


def test_a_sequence_larger_than_the_pool_is_refused_and_one_that_fits_exactly_is_not(
    qwen3: DecoderLM,
) -> None:
    small = engine(qwen3, num_blocks=2)

    with pytest.raises(ClientError, match="KV cache is 16 tokens, but 17 were requested"):
        small.add(spec(max_tokens=13))

    assert len(run(small, [spec(max_tokens=12)])["a"]) == 12


def test_the_same_key_twice_and_a_finished_prefix_are_bugs_of_the_caller(qwen3: DecoderLM) -> None:
    busy = engine(qwen3)
    busy.add(spec())

    with pytest.raises(BugError, match="in the engine already"):
        busy.add(spec())
    with pytest.raises(BugError, match="nothing to compute"):
        busy.add(spec("b", prefix_ids=[1] * 12))


def test_a_failing_step_fails_only_its_own_sequences(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = many(4)
    expected = run(engine(qwen3), requests[2:])
    narrow = engine(qwen3, max_sequences=2, max_step_tokens=100)
    for request in requests:
        narrow.add(request)

    def fail(*args: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(DecoderLM, "head", fail)
        patched.setattr(DecoderLM, "embed", fail)
        with pytest.raises(StepFailedError, match="RuntimeError: out of luck") as caught:
            narrow.step()
    rest: dict[str, list[int]] = {"2": [], "3": []}
    while narrow.has_work:
        for output in tokens(narrow.step()):
            rest[output.key].append(output.token_id)

    assert caught.value.keys == ("0", "1")
    assert rest == {key: ids(outputs) for key, outputs in expected.items()}
    assert narrow.stats().kv_used == 0


def test_a_step_that_loses_the_gpu_ends_the_engine(qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = engine(qwen3)
    lost.add(spec())

    def fail(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def check_context(device: torch.device) -> None:
        raise DeviceLostError(f"{device} is lost")

    monkeypatch.setattr(DecoderLM, "embed", fail)
    monkeypatch.setattr(DecoderLM, "head", fail)
    monkeypatch.setattr("workers.kv_engine.engine.check_context", check_context)

    with pytest.raises(DeviceLostError, match="cpu is lost"):
        lost.step()


def test_logits_that_are_not_numbers_fail_only_their_sequence(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [spec("a"), spec("b", prompt_ids=[9, 9, 9])]
    expected = run(engine(qwen3), requests)
    busy = engine(qwen3)
    for request in requests:
        busy.add(request)
    head = DecoderLM.head

    def poisoned(self: DecoderLM, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits = head(self, hidden, indices)
        logits[0, 17] = float("nan")
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(DecoderLM, "head", poisoned)
        with pytest.raises(StepFailedError, match="not numbers for 1 of 2") as caught:
            busy.step()
    answer = caught.value.outputs
    while busy.has_work:
        answer += busy.step()

    assert caught.value.keys == ("a",)
    assert ids(answer) == ids(expected["b"])


def test_the_blocks_of_a_sequence_whose_states_are_not_numbers_are_not_shared(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the embedding of one token infinite, as a damaged row or a float16 overflow would."""
    broken = 7
    begins = [5] * 16 + [9] * 15
    damaged = [*begins[:8], broken, *begins[9:]]
    requests = [spec("a", prompt_ids=damaged), spec("b", prompt_ids=begins)]
    expected = ids(run(engine(qwen3), requests[1:])["b"])
    served = engine(qwen3, max_step_tokens=64)
    embeddings = qwen3.model.get_input_embeddings()
    weight = embeddings.weight.detach().clone()
    weight[broken] = torch.inf
    monkeypatch.setitem(embeddings._parameters, "weight", torch.nn.Parameter(weight, requires_grad=False))
    for key in ("a", "a again"):
        served.add(replace(requests[0], key=key))
        with pytest.raises(StepFailedError, match="not numbers for 1 of 1"):
            served.step()
    [answer] = run(served, requests[1:]).values()

    assert ids(answer) == expected


def test_it_counts_the_work_it_has_done(qwen3: DecoderLM) -> None:
    counted = engine(qwen3)
    run(counted, [spec("a", max_tokens=3, ignore_eos=True), spec("b", max_tokens=2, ignore_eos=True)])
    work = counted.stats().work

    assert (work.sequences, work.sampled_tokens) == (2, 5)
    # Two prompts of 4; the last token of each answer is not run through the model.
    assert work.computed_tokens == 2 * 4 + 2 + 1
    assert work.step_s.count == counted.forwards == 3
    assert (work.batch_rows.sum, work.batch_rows.counts[:2]) == (5, [1, 2])
    assert 0 < work.step_s.sum < 60
