"""The node `vision_encoder`: batches of alike media, and the cache of their rows."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.base import Item, StatelessResult
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual
from shared.errors import BugError


class Doubling(VisionEncoder):
    """A tower whose rows are twice its pixels; it notes the shapes of its batches."""

    def __init__(self, *, at_once: int = 1) -> None:
        super().__init__(SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32))
        self._images_at_once = at_once
        self.batches: list[tuple[int, ...]] = []

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        assert len(pixels) == len(visuals)
        self.batches.append(tuple(pixels.shape))
        return [*(2 * pixels)]


def visual(digest: str, rows: int, width: int = 2, **more: Any) -> dict[str, Any]:
    return {"digest": digest, "shape": (rows, width), "rows": rows, **more}


def item(*visuals: dict[str, Any], start: float = 0) -> Item:
    numbers = sum(one["shape"][0] * one["shape"][1] for one in visuals)
    pixels = torch.arange(start, start + numbers)
    return Item(inputs={"pixels": pixels}, args={"visuals": visuals, "max_tokens": 4})


def embeds(result: StatelessResult | Exception) -> list[list[float]]:
    assert isinstance(result, StatelessResult)
    rows: list[list[float]] = result.outputs["embeds"].tolist()
    return rows


def test_the_rows_of_all_media_of_a_request_are_in_the_order_of_the_prompt() -> None:
    (result,) = Doubling().run([item(visual("a", 1), visual("b", 2))])

    assert embeds(result) == [[0, 2], [4, 6], [8, 10]]


def test_rows_are_computed_once_for_all_requests_and_kept() -> None:
    tower = Doubling()

    first, second = tower.run([item(visual("a", 1), visual("a", 1)), item(visual("a", 1))])
    (third,) = tower.run([item(visual("b", 1), visual("a", 1))])

    assert embeds(first) == [[0, 2], [0, 2]]
    assert embeds(second) == [[0, 2]]
    assert embeds(third)[1] == [0, 2]
    assert len(tower.batches) == 2
    assert tower.encoder_cache.counters.hits == 1
    assert tower.encoder_cache.counters.entries == 2


def test_media_of_one_shape_are_computed_together() -> None:
    tower = Doubling(at_once=2)
    wide, tall = [visual(name, 1) for name in "abc"], [visual(name, 3) for name in "de"]

    results = tower.run([item(wide[0], tall[0]), item(tall[1], wide[1]), item(wide[2], start=100)])

    assert sorted(tower.batches) == [(1, 1, 2), (2, 1, 2), (2, 3, 2)]
    assert embeds(results[1]) == [[0, 2], [4, 6], [8, 10], [12, 14]]
    assert embeds(results[2]) == [[200, 202]]


def test_media_of_one_shape_with_other_grids_are_computed_apart() -> None:
    tower = Doubling(at_once=8)

    tower.run([item(visual("a", 4, grid=(1, 2, 2)), visual("b", 4, grid=(1, 1, 4)))])

    assert tower.batches == [(1, 4, 2), (1, 4, 2)]


def test_a_tower_that_makes_other_rows_than_the_prompt_has_places_is_a_bug() -> None:
    wrong = visual("a", 2) | {"rows": 3}

    with pytest.raises(BugError, match="expected 3 rows of a medium of the shape"):
        Doubling().run([item(wrong)])


def test_the_cost_of_a_request_is_the_size_of_its_pixels() -> None:
    assert Doubling().cost(item(visual("a", 3), visual("b", 1))) == 8
