"""The splits of keys of the Triton kernel of attention; its results are in `test_interpreted`."""

import pytest

pytest.importorskip("triton", reason="Triton is made for Linux only")


def test_keys_are_cut_for_a_gpu_to_be_busy_but_not_into_scraps() -> None:
    from workers.kv_engine.attention.triton import (  # noqa: PLC0415 - where there is Triton
        MAX_SPLITS,
        split_count,
    )

    assert split_count(8, 40_960, processors=132) == MAX_SPLITS
    assert split_count(256 * 8, 40_960, processors=132) == 1
    assert split_count(64 * 8, 40_960, processors=132) == 3
    assert split_count(64, 40_960, processors=132) == 17
    assert split_count(8, 1000, processors=132) == 3
    assert split_count(8, 16, processors=132) == 1
