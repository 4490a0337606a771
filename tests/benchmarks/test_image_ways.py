"""Ways to draw an image, in turns: seeds differ by round, and each result is printed at once."""

from functools import partial

import pytest

from benchmarks.image_ways import in_process, in_turns
from benchmarks.pipelines import SMALL, Asked


def test_every_way_draws_in_each_round_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[tuple[str, Asked, int]] = []

    def draw(name: str, image: Asked, seed: int) -> None:
        drawn.append((name, image, seed))

    ways = {name: in_process(partial(draw, name)) for name in ("one", "other")}

    found = in_turns(ways, SMALL, rounds=2)

    assert drawn == [("one", SMALL, 0), ("other", SMALL, 0), ("one", SMALL, 1000), ("other", SMALL, 1000)]
    assert {name: len(rates.per_s) for name, rates in found.items()} == {"one": 2, "other": 2}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "round 1: one", "round 1: other", "round 2: one", "round 2: other",
    ]  # fmt: skip
