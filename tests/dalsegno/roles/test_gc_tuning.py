"""The collector's pace."""

import gc

from dalsegno.roles.gc_tuning import THRESHOLDS, collected_seldom, freeze_all


def test_the_collector_is_slowed_within_the_block_alone() -> None:
    before = gc.get_threshold()
    with collected_seldom():
        assert gc.get_threshold() == THRESHOLDS

    assert gc.get_threshold() == before


def test_at_the_end_nothing_is_looked_at_any_more() -> None:
    try:
        freeze_all()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
