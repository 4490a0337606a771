"""The set of weights of each token (`Pass.routes`) reaches the node's forward beside tokens of texts."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from models.base import TokenStep
from models.programs import NewTokens, Pass, TokenRequest
from shared.errors import BugError
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.programs.infill import infill_node
from tests.workers.kv_engine.programs.test_programs import texts
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.programs.checks import PassChecks
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec

SIZES: Final[dict[str, Any]] = {
    "num_blocks": 100, "block_size": 4, "max_step_tokens": 64, "max_sequences": 16,
}  # fmt: skip
ROUTES: Final = torch.tensor([0, 1, 1, 0], dtype=torch.int8)


class TwoHeads:
    """A node whose second set of weights gives states of the opposite sign."""

    def __init__(self) -> None:
        self._node: Any = infill_node()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        hidden: torch.Tensor = self._node.forward(inputs, step)
        return hidden if step.routes is None else hidden * (1 - 2 * step.routes[:, None])


class OnePass:
    max_contexts = 1
    max_tokens = 8

    def __init__(self, routes: torch.Tensor | None) -> None:
        self.found = torch.zeros(0)
        self._routes = routes

    def passes(self) -> list[Pass]:
        return [Pass(context="a", ids=[5, 6, 7, 8], routes=self._routes)]

    def take(self, results: Sequence[torch.Tensor]) -> NewTokens | None:
        self.found = results[0].float().clone()
        return NewTokens(ids=[1], ended=True)


def run(routes: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[int]]:
    """The states of a pass with each of these routes, and the tokens of the texts beside them."""
    node: Any = TwoHeads()
    drivers = [OnePass(one) for one in routes]

    def start(_: Any, request: TokenRequest) -> OnePass:
        return drivers[request.seed]

    node.token_programs["one"] = start
    engine = make_engine(node, **SIZES)
    for one in texts(3):
        engine.add(one)
    for number in range(len(drivers)):
        engine.add(_spec(number))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [one.token_id for one in engine.step() if isinstance(one, TokenOutput)]
    return [one.found for one in drivers], tokens


def _spec(number: int) -> SequenceSpec:
    sampling = Sampling(seed=number)
    return SequenceSpec(
        key=f"run {number}", prompt_ids=[1], max_tokens=1, token_program="one", sampling=sampling
    )


def test_each_token_of_a_pass_has_its_own_weights_and_texts_have_the_first() -> None:
    [plain], tokens = run([None])

    (routed, beside), with_routes = run([ROUTES, None])

    signs = 1 - 2 * ROUTES[:, None].float()
    torch.testing.assert_close(routed, plain * signs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(beside, plain, atol=1e-5, rtol=1e-5)
    assert with_routes == tokens


def test_routes_of_another_length_are_refused() -> None:
    with pytest.raises(BugError, match=r"a pass of 4 tokens has routes of shape \(3,\)"):
        PassChecks({"": infill_node()}, max_tokens=8).check_round(OnePass(ROUTES[:3]).passes())
