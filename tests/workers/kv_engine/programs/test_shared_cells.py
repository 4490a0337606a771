"""A tower that shares its node's cells: each reads what the other has written."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from transformers import DynamicCache

from models.programs import Mask, NewTokens, Pass, TokenRequest
from shared.errors import BugError
from tests.tiny.infilling.nodes import JUDGE, InfillLM
from tests.workers.cpu_kernels import models
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.programs.test_programs import texts
from workers.kv_engine.sequence_spec import SequenceSpec

PROMPT: Final = [5, 9, 2, 44, 17, 3, 8]
SIZES: Final[dict[str, Any]] = {
    "num_blocks": 100, "block_size": 4, "max_step_tokens": 64, "max_sequences": 16,
}  # fmt: skip
ROUNDS: Final = (
    Pass(context="a", ids=PROMPT, commits=True),
    Pass(context="a", ids=[1, 2, 3], mask=Mask.FULL, tower=JUDGE),
    Pass(context="a", ids=[4, 6, 7], mask=Mask.FULL, tower=JUDGE, commits=True),
    Pass(context="b", ids=[11, 12], forks="a"),
)


def shared_node() -> Any:
    """A node, and a tower of the same layout with other weights."""
    tower: Any = models.node()
    for weight in tower.model.model.layers.parameters():
        weight.data = weight.data.flip(0).clone()
    return sharing(InfillLM(models.node(), tower))


def sharing(node: InfillLM) -> Any:
    node.towers[JUDGE].shares_cells = True  # type: ignore[attr-defined]
    return node


class Rounds:
    """Asks for one pass in each round, and keeps the results."""

    max_contexts = 2
    max_tokens = 40

    def __init__(self, rounds: Sequence[Pass]) -> None:
        self.results: list[torch.Tensor] = []
        self._rounds = rounds

    def passes(self) -> list[Pass]:
        return [self._rounds[len(self.results)]]

    def take(self, results: Sequence[torch.Tensor]) -> NewTokens | None:
        self.results += [one.float().clone() for one in results]
        return NewTokens(ids=[1], ended=True) if len(self.results) == len(self._rounds) else None


@torch.inference_mode()
def computed(model: Any, ids: Sequence[int], cache: DynamicCache, *, full: bool = False) -> torch.Tensor:
    """States of tokens after the cache's, by transformers; the cache is extended."""
    known, count = cache.get_seq_length(), len(ids)
    visible = torch.ones(count, known + count, dtype=torch.bool)
    if not full:
        visible = visible.tril(known)
    output = model.model(
        input_ids=torch.tensor([list(ids)]),
        attention_mask=torch.zeros(()).where(visible, float("-inf"))[None, None],
        position_ids=torch.arange(known, known + count)[None],
        past_key_values=cache,
    )
    states: torch.Tensor = output.last_hidden_state[0].float()
    return states


def run(node: Any, rounds: Sequence[Pass]) -> list[torch.Tensor]:
    driver = Rounds(rounds)

    def start(_: Any, request: TokenRequest) -> Rounds:
        return driver

    node.token_programs["rounds"] = start
    engine = make_engine(node, **SIZES)
    for one in texts(3):
        engine.add(one)
    engine.add(SequenceSpec(key="run", prompt_ids=[1], max_tokens=1, token_program="rounds"))
    while engine.has_work:
        engine.step()
    return driver.results


def test_both_read_what_the_other_has_written() -> None:
    stock, cache = shared_node(), DynamicCache()
    model, tower = stock.model, stock.towers[JUDGE].model
    prompt = computed(model, PROMPT, cache)
    uncommitted = computed(tower, [1, 2, 3], cache, full=True)
    cache.crop(-3)
    committed = computed(tower, [4, 6, 7], cache, full=True)
    forked = computed(model, [11, 12], cache)

    found = run(shared_node(), ROUNDS)

    for one, expected in zip(found, [prompt, uncommitted, committed, forked], strict=True):
        torch.testing.assert_close(one, expected, atol=1e-3, rtol=1e-3)
    alone = computed(tower, [1, 2, 3], DynamicCache(), full=True)
    assert not torch.allclose(uncommitted, alone, atol=0.05), "the control: the prompt matters"


def test_a_tower_of_another_layout_cannot_share() -> None:
    node = sharing(InfillLM(models.node(), models.node("llama")))

    with pytest.raises(BugError, match=r"tower 'judge' shares the cells of node 'llm': expected KVLayout"):
        make_engine(node, **SIZES)
