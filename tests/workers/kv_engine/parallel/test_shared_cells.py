"""Keys and values move between groups of any sizes; the answer is that of one rank."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.base import CellShape, KVLayout
from tests.tiny import Family, tiny_checkpoint
from tests.tiny.four_heads import write_four_heads
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import clear_text, ids, run
from tests.workers.kv_engine.shared_node import parts_of, shared
from tests.workers.kv_engine.test_kv_transfer import EXPORT, Slots
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.kv_transfer import KVMismatchError
from workers.kv_engine.parallel import shared_cells
from workers.kv_engine.parallel.shared_cells import SharedCells, order_of, whole_layout
from workers.kv_engine.sequence_spec import SequenceSpec

pytestmark = pytest.mark.processes

TOKENS = 16
LENGTH = 41
SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 24, "max_sequences": 4}


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_four_heads(tmp_path_factory.mktemp("four"))


def engine(stack: ExitStack, checkpoint: Path, members: int, **sizes: Any) -> KVEngine:
    """The engine of a group, or of a rank."""
    nodes = parts_of(checkpoint, members)
    if members == 1:
        return make_engine(nodes[0], **(SIZES | sizes))
    return stack.enter_context(shared(nodes, SIZES | sizes)).leader


def handed_over(
    checkpoint: Path,
    text: list[int],
    first: int,
    second: int,
    change: Callable[[Slots], None] = lambda _: None,
) -> list[int]:
    """The answer of which `first` members compute the prompt, and `second` the rest."""
    slots = Slots()
    with ExitStack() as stack:
        one = engine(stack, checkpoint, first, export_to=slots.allocate)
        asked = SequenceSpec(key="a", prompt_ids=text, max_tokens=1, export=EXPORT)
        [begun] = run(one, [asked])["a"]
    change(slots)
    with ExitStack() as stack:
        other = engine(stack, checkpoint, second, num_blocks=40, block_size=5)
        rest = replace(asked, max_tokens=TOKENS, prefix_ids=[begun.token_id], kv=slots.read(), export=None)
        found = [begun.token_id, *ids(run(other, [rest])["a"])]
        assert other.stats().work.computed_tokens == TOKENS - 1, "the prompt was not computed again"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4), (4, 1), (1, 4), (2, 2), (1, 2)])
def test_a_group_hands_over_to_one_of_another_size(four_heads: Path, first: int, second: int) -> None:
    text, expected = clear_text("llama", LENGTH, TOKENS)

    assert handed_over(four_heads, text, first, second) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma3", "gemma4", "glm_dsa", "qwen3_moe"]
)
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_layers_of_other_shapes_are_handed_over(family: Family, first: int, second: int) -> None:
    text, expected = clear_text(family, LENGTH, TOKENS)

    assert handed_over(tiny_checkpoint(family), text, first, second) == expected


def test_parts_in_another_order_give_another_answer(four_heads: Path) -> None:
    """Negative control: the heads of each member are its own."""
    text, expected = clear_text("llama", LENGTH, TOKENS)

    def turned(slots: Slots) -> None:
        kv = slots.arrays["kv"]
        numbers = kv.data.view("<f4").reshape(kv.shape)
        numbers[:] = np.roll(numbers, 2, axis=3)

    assert handed_over(four_heads, text, 4, 2, turned) != expected


def test_long_texts_move_in_runs(four_heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected = clear_text("llama", LENGTH, TOKENS)
    monkeypatch.setattr(shared_cells, "RUN_BYTES", 1024)
    runs: list[int] = []
    order = SharedCells._order

    def noted(self: SharedCells, kind: int, cells: torch.Tensor) -> None:
        runs.append(len(cells))
        order(self, kind, cells)

    monkeypatch.setattr(SharedCells, "_order", noted)

    assert handed_over(four_heads, text, 4, 2) == expected
    assert len(runs) > 4
    assert sum(runs) == 2 * LENGTH


def test_keys_and_values_of_a_part_do_not_fit_the_whole(four_heads: Path) -> None:
    text, _ = clear_text("llama", LENGTH, TOKENS)

    def halved(slots: Slots) -> None:
        kv = slots.arrays["kv"]
        shape = (*kv.shape[:3], kv.shape[3] // 2, kv.shape[4])
        slots.arrays["kv"] = replace(kv, shape=shape, data=kv.data[: kv.data.nbytes // 2])

    with pytest.raises(KVMismatchError, match=r"expected float32\[2, 2, tokens, 4, 16\]"):
        handed_over(four_heads, text, 4, 2, halved)


def test_a_latent_is_whole_on_every_member() -> None:
    latent = CellShape(1, 40, 32, is_latent=True)
    part = KVLayout(layers=2, kv_heads=1, head_dim=40, cells=(latent, latent))

    assert whole_layout(part, 4) == part
    assert whole_layout(KVLayout(layers=2, kv_heads=1, head_dim=16), 4).kv_heads == 4


def test_a_step_is_no_order() -> None:
    assert order_of(np.array([3, 1, 1, 8], np.int32).tobytes(), torch.device("cpu")) is None
