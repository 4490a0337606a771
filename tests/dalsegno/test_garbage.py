"""The collector's pace."""

import gc

from dalsegno.garbage import THRESHOLDS, collected_seldom


def test_the_collector_is_slowed_within_the_block_alone() -> None:
    before = gc.get_threshold()
    with collected_seldom():
        assert gc.get_threshold() == THRESHOLDS

    assert gc.get_threshold() == before
