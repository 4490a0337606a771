"""Random passes over contexts that fork, are cropped and extended, on two models, against a naive oracle."""

from dataclasses import replace
from random import Random
from typing import Any, Final

import torch

from models.programs import Mask, NewTokens, Pass, TokenRequest
from tests.tiny.infilling.nodes import JUDGE
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.programs.infill import infill_node
from tests.workers.kv_engine.programs.pass_oracle import PassOracle
from tests.workers.kv_engine.programs.test_programs import texts
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec

RUNS: Final = 24
ROUNDS: Final = 12
CONTEXTS: Final = 4
LONGEST: Final = 48
"""The most tokens of a context."""


class RandomDriver:
    """Asks for random passes, and compares each result with the oracle's."""

    max_contexts = CONTEXTS
    max_tokens = CONTEXTS * LONGEST

    def __init__(self, seed: int, oracle: PassOracle) -> None:
        self.rounds = 0
        self._random = Random(seed)
        self._oracle = oracle
        self._committed: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._towers: dict[str, str] = {}
        self._asked = self._round()

    def passes(self) -> list[Pass]:
        return self._asked

    def take(self, results: Any) -> NewTokens | None:
        for found, expected in zip(results, self._oracle.results(self._asked), strict=True):
            torch.testing.assert_close(found.float(), expected.float(), atol=1e-3, rtol=1e-3)
        self.rounds += 1
        self._asked = self._round()
        return NewTokens(ids=[1], ended=True) if self.rounds == ROUNDS else None

    def _round(self) -> list[Pass]:
        random, before = self._random, dict(self._committed)
        known = random.sample(sorted(before), random.randint(0, len(before)))
        asked = [self._over(name) for name in known]
        if len(before) < CONTEXTS and (not asked or random.random() < 0.5):
            asked.append(self._opening(before))
        return random.sample(asked, len(asked)) or [self._over(random.choice(sorted(before)))]

    def _opening(self, before: dict[str, int]) -> Pass:
        """The first pass of another context: a fork of one that had tokens before this round, or empty."""
        name, tower = f"context {len(before)}", self._random.choice(["", "", JUDGE])
        origins = [one for one in before if before[one] and self._towers[one] == tower]
        origin = self._random.choice(["", *origins])
        self._towers[name], self._committed[name], self._last[name] = tower, before.get(origin, 0), 0
        return replace(self._over(name, is_first=True), forks=origin)

    def _over(self, name: str, *, is_first: bool = False) -> Pass:
        random = self._random
        count = random.randint(1, 9)
        cells = self._committed[name] + self._last[name]
        after = random.randint(0, min(cells, LONGEST - count))
        if is_first or (random.random() < 0.4 and self._committed[name] + count <= LONGEST):
            after = self._committed[name]
        commits = random.random() < 0.5
        asked = Pass(
            context=name,
            ids=[random.randrange(500) for _ in range(count)],
            positions=torch.tensor([random.randrange(99) for _ in range(count)])
            if random.random() < 0.3
            else None,
            mask=random.choice([Mask.FULL, Mask.CAUSAL]),
            commits=commits,
            after=None if after == self._committed[name] else after,
            logits=sorted(random.sample(range(count), random.randint(1, count)))
            if random.random() < 0.5
            else None,
            tower=self._towers[name],
        )
        self._committed[name], self._last[name] = (after + count, 0) if commits else (after, count)
        return asked


def test_random_passes_beside_texts_are_each_as_the_oracle_says() -> None:
    """Blocks of four cells: most forks and crops are within a block, and have to copy it."""
    stock, drivers = infill_node(), list[RandomDriver]()
    served = infill_node()  # its layers attend over the pool

    def start(node: Any, request: TokenRequest) -> RandomDriver:
        assert node is served
        oracle = PassOracle({"": stock.model, JUDGE: stock.towers[JUDGE].model})
        drivers.append(RandomDriver(request.seed, oracle))
        return drivers[-1]

    served.token_programs["random"] = start
    by = make_engine(
        served, num_blocks=400, block_size=4, max_step_tokens=64, max_sequences=16, max_pass_tokens=40
    )
    for seed in range(RUNS):
        by.add(
            SequenceSpec(
                key=f"run {seed}",
                prompt_ids=[1],
                max_tokens=1,
                token_program="random",
                sampling=Sampling(seed=seed),
            )
        )
    for one in texts(3):
        by.add(one)

    while by.has_work:
        by.step()

    assert [one.rounds for one in drivers] == [ROUNDS] * RUNS
    assert by.stats().kv_used == 0
