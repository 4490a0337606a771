"""Transfer of keys and values between engines: the answer is that of a single engine."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from models.base import KVLayout
from models.decoder_lm.nodes import DecoderLM, load
from shared.errors import BugError, CapacityError, DalSegnoError, TensorGone
from shared.tensors import Handle
from tests.tiny import FAMILIES, Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, prompts, run, tokens
from workers.data_plane.port import Array, Bytes
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.kv_transfer import KVMismatchError, export_kv, import_kv, shape_of
from workers.kv_engine.outputs import StepFailedError, TokenOutput
from workers.kv_engine.sequence_spec import FinishReason, KvExport, Sampling, SequenceSpec

SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.2)


@dataclass
class Slots:
    """A store whose slots are pieces of this process's memory."""

    arrays: dict[str, Array] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    def allocate(self, key: str, dtype: str, shape: tuple[int, ...], *, scope: str) -> tuple[Handle, Bytes]:
        if self.error is not None:
            raise self.error
        data = np.full(int(np.prod(shape)) * getattr(torch, dtype).itemsize, 0xFF, np.uint8)
        self.arrays[key] = Array(dtype=dtype, shape=shape, data=data)
        self.scopes[key] = scope
        return Handle(key=key, dtype=dtype, shape=shape), data

    def read(self, key: str = "kv") -> Array:
        """Return the array as a store does: read-only."""
        array = self.arrays[key]
        data = array.data.view()
        data.flags.writeable = False
        return replace(array, data=data)


def engine(node: DecoderLM, slots: Slots | None = None, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 24, "max_sequences": 4}
    return make_engine(node, **(sizes | changes), export_to=slots.allocate if slots else None)


def spec(**changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {"key": "a", "prompt_ids": TEXT, "max_tokens": 12, "sampling": SAMPLED}
    return SequenceSpec(**(values | changes))


[TEXT] = prompts(1, seed=3, shortest=41, longest=41)
EXPORT = KvExport(key="kv", scope="r/1/2")


def prefilled(node: DecoderLM, **changes: Any) -> tuple[TokenOutput, Slots]:
    """Return the first token, and the keys and values of the prompt."""
    slots = Slots()
    [output] = run(engine(node, slots), [spec(max_tokens=1, export=EXPORT, **changes)])["a"]
    return output, slots


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_that_continues_in_another_engine_answers_as_in_one(family: Family) -> None:
    """The 41 tokens of the prompt exceed the windows of 24; the other pool has another block size."""
    node = load(tiny_checkpoint(family))
    slots = Slots()
    one, other = engine(node, slots), engine(node, num_blocks=40, block_size=5)
    whole = ids(run(one, [spec()])["a"])
    [first] = run(one, [spec(max_tokens=1, export=EXPORT)])["a"]
    [unrelated] = prompts(1, seed=4, shortest=9, longest=9)

    found = run(
        other,
        [
            spec(key="unrelated", prompt_ids=unrelated),
            spec(key="a", prefix_ids=[first.token_id], kv=slots.read()),
        ],
    )

    assert [first.token_id, *ids(found["a"])] == whole
    assert found["a"][0].index == 1
    assert first.kv is not None
    assert first.kv.shape == shape_of(node.layout, 41, itemsize=4)
    assert slots.scopes == {"kv": "r/1/2"}
    # Of the imported sequence only the 11 sampled tokens are run; of the other one 9 + 11.
    assert other.stats().work.computed_tokens == 11 + 9 + 11


@pytest.mark.slow
def test_a_sequence_continues_in_bfloat16_too() -> None:
    node = load(tiny_checkpoint("qwen3"), dtype="bfloat16")
    whole = ids(run(engine(node), [spec()])["a"])
    first, slots = prefilled(node)

    rest = run(engine(node, block_size=3), [spec(prefix_ids=[first.token_id], kv=slots.read())])["a"]

    assert [first.token_id, *ids(rest)] == whole
    assert slots.arrays["kv"].dtype == "bfloat16"


def test_other_keys_and_values_give_another_answer(qwen3: DecoderLM) -> None:
    """Negative control: the imported keys and values are used."""
    first, slots = prefilled(qwen3)
    whole = ids(run(engine(qwen3), [spec()])["a"])
    slots.arrays["kv"].data[:] = 0

    rest = run(engine(qwen3), [spec(prefix_ids=[first.token_id], kv=slots.read())])["a"]

    assert [first.token_id, *ids(rest)] != whole


def test_an_ended_answer_can_be_exported_and_continued(qwen3: DecoderLM) -> None:
    """Export prompt and answer but the last token, which was never run; a longer prompt continues from it."""
    slots = Slots()
    whole = run(engine(qwen3), [spec(max_tokens=20)])["a"]
    begin = run(engine(qwen3, slots), [spec(export=EXPORT)])["a"]

    rest = run(engine(qwen3), [spec(max_tokens=20, prefix_ids=ids(begin), kv=slots.read())])["a"]

    assert begin[-1].finish is FinishReason.LENGTH
    assert [output.kv is None for output in begin] == [True] * 11 + [False]
    assert slots.arrays["kv"].shape[2] == 41 + 11
    assert ids(begin) + ids(rest) == ids(whole)


@pytest.mark.parametrize("known", [0, 1, 17, 41])
def test_tokens_without_imported_keys_are_computed(qwen3: DecoderLM, known: int) -> None:
    """With keys for the whole prompt, the last token is run again, for the next one is sampled after it."""
    _, slots = prefilled(qwen3)
    array = slots.read()
    cut = array.data.view(np.float32).reshape(array.shape)[:, :, :known]
    kv = Array(dtype="float32", shape=cut.shape, data=np.ascontiguousarray(cut).reshape(-1).view(np.uint8))
    busy = engine(qwen3)

    found = run(busy, [spec(kv=kv)])["a"]

    assert ids(found) == ids(run(engine(qwen3), [spec()])["a"])
    assert busy.stats().work.computed_tokens == 41 + 11 - min(known, 40)


def test_the_end_of_an_import_is_reported(qwen3: DecoderLM) -> None:
    first, slots = prefilled(qwen3)
    read: list[int] = []
    busy = engine(qwen3)
    busy.add(
        spec(
            prefix_ids=[first.token_id],
            kv=slots.read(),
            on_kv_read=lambda: read.append(busy.stats().forwards),
        )
    )
    assert read == []

    busy.step()
    slots.arrays["kv"].data[:] = 0

    assert read == [0]  # before anything was computed from it
    assert first.token_id == ids(run(engine(qwen3), [spec()])["a"])[0]
    rest = [output for _ in range(10) for output in busy.step()]
    assert ids(rest) == ids(run(engine(qwen3), [spec()])["a"])[2:]


def test_bytes_freed_during_the_copy_fail_only_their_sequence(qwen3: DecoderLM) -> None:
    first, slots = prefilled(qwen3)
    expected = ids(run(engine(qwen3), [spec()])["a"])

    def gone() -> None:
        raise TensorGone("its slot was freed")

    busy = engine(qwen3)
    busy.add(spec(key="lost", prefix_ids=[first.token_id], kv=slots.read(), on_kv_read=gone))
    busy.add(spec(key="b"))
    with pytest.raises(StepFailedError) as caught:
        busy.step()
    answer = tokens(caught.value.outputs)
    while busy.has_work:
        answer += tokens(busy.step())

    assert caught.value.keys == ()
    assert [(key, type(error)) for key, error in caught.value.others.items()] == [("lost", TensorGone)]
    assert ids(answer) == expected
    assert busy.stats().kv_used == 0


def test_a_failed_import_of_the_only_sequence_runs_no_forward(qwen3: DecoderLM) -> None:
    first, slots = prefilled(qwen3)

    def gone() -> None:
        raise TensorGone("its slot was freed")

    busy = engine(qwen3)
    busy.add(spec(prefix_ids=[first.token_id], kv=slots.read(), on_kv_read=gone))

    with pytest.raises(StepFailedError, match="its slot was freed") as caught:
        busy.step()
    assert list(caught.value.others) == ["a"]
    assert (busy.has_work, busy.forwards) == (False, 0)


def test_a_full_store_fails_the_sequence_to_export(qwen3: DecoderLM) -> None:
    busy = engine(qwen3, Slots(error=CapacityError("the arena is full")), max_step_tokens=100)
    busy.add(spec(max_tokens=1, export=EXPORT))
    busy.add(spec(key="b"))

    with pytest.raises(StepFailedError) as caught:
        busy.step()
    rest = [output for _ in range(12) for output in busy.step()]

    assert [(key, type(error)) for key, error in caught.value.others.items()] == [("a", CapacityError)]
    assert ids([*caught.value.outputs, *rest]) == ids(
        run(engine(qwen3, max_step_tokens=100), [spec(key="b")])["b"]
    )
    assert (busy.has_work, busy.stats().kv_used) == (False, 0)


SHAPE = (2, 2, 41, 2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": "bfloat16"},
            r"keys and values are bfloat16\[2, 2, 41, 2, 16\]: expected float32\[2, 2, tokens",
        ),
        (
            {"shape": (3, 2, 41, 2, 16)},
            r"keys and values are float32\[3, .*expected float32\[2, 2, tokens, 2, 16\]",
        ),
        ({"shape": (2, 2, 41, 32)}, r"keys and values are float32\[2, 2, 41, 32\]: expected"),
        ({"shape": (2, 2, 42, 2, 16)}, "have 42 tokens: expected at most 41"),
        ({"data": np.zeros(8, np.uint8)}, "do not fit their shape: expected 20992 bytes .*, found 8"),
    ],
)
def test_imports_that_do_not_fit_the_pool_are_refused(
    qwen3: DecoderLM, changes: dict[str, Any], message: str
) -> None:
    assert qwen3.layout == KVLayout(layers=2, kv_heads=2, head_dim=16)
    fitting = Array(dtype="float32", shape=SHAPE, data=np.zeros(4 * 2 * 2 * 41 * 2 * 16, np.uint8))
    empty = engine(qwen3)

    with pytest.raises(KVMismatchError, match=message):
        empty.add(spec(kv=replace(fitting, **changes)))

    assert not empty.has_work
    empty.add(spec(kv=fitting))


@pytest.mark.parametrize(
    ("slots", "changes", "message"),
    [
        (None, {"export": EXPORT}, "has no store"),
        (
            Slots(),
            {"export": EXPORT, "max_tokens": 0, "scores_prompt": True, "logprobs": 1},
            "generates no token",
        ),
        (Slots(), {"export": EXPORT, "prefix_ids": [1] * 12}, "nothing to compute"),
        (
            None,
            {"kv": Array(dtype="float32", shape=SHAPE, data=np.zeros(1, np.uint8)), "scores_prompt": True}
            | {"logprobs": 1},
            "has scores_prompt, but imports keys and values",
        ),
    ],
)
def test_impossible_transfers_are_a_bug_of_the_caller(
    qwen3: DecoderLM, slots: Slots | None, changes: dict[str, Any], message: str
) -> None:
    empty = engine(qwen3, slots)

    with pytest.raises(BugError, match=message) as caught:
        empty.add(spec(**changes))

    assert isinstance(caught.value, DalSegnoError)
    assert not empty.has_work


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_export_and_import_copy_cells_exactly(dtype: torch.dtype) -> None:
    def pool() -> PagedPool:
        return PagedPool(
            KVLayout(layers=3, kv_heads=2, head_dim=4), slots=20, device=torch.device("cpu"), dtype=dtype
        )

    source, target = pool(), pool()
    torch.manual_seed(0)
    for cache in (*source.keys, *source.values):
        cache.copy_(torch.randn(cache.shape))
    cells, elsewhere = torch.tensor([7, 3, 19, 0]), torch.tensor([1, 2, 18, 4])
    shape = (3, 2, 4, 2, 4)
    name = str(dtype).removeprefix("torch.")
    array = Array(dtype=name, shape=shape, data=np.zeros(192 * dtype.itemsize, np.uint8))

    export_kv(source, cells, array)
    import_kv(target, elsewhere, array)

    for layer in range(3):
        assert torch.equal(source.keys[layer][cells], target.keys[layer][elsewhere])
        assert torch.equal(source.values[layer][cells], target.values[layer][elsewhere])
        untouched = [cell for cell in range(20) if cell not in elsewhere.tolist()]
        assert not target.keys[layer][untouched].any()
    of_layer_1 = torch.from_numpy(array.data).view(dtype).view(shape)[1]
    assert torch.equal(of_layer_1[0], source.keys[1][cells])
    assert torch.equal(of_layer_1[1], source.values[1][cells])
