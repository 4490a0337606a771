"""A quantile is one of the values, in any order; nothing has none."""

import pytest

from shared.quantile import quantile


@pytest.mark.parametrize(("share", "found"), [(0.0, 1.0), (0.5, 3.0), (0.9, 4.0), (1.0, 4.0)])
def test_a_quantile_is_the_value_of_the_nearest_rank(share: float, found: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == found


def test_nothing_has_no_quantile() -> None:
    assert quantile([], 0.5) is None
