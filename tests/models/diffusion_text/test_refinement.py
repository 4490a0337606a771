"""A block is refined to its end, whatever the confidences, and never in a place that is known."""

import pytest
import torch

from models.diffusion_text.candidates import Candidates
from models.diffusion_text.refinement import Block, Rules

MASK = 9


@pytest.mark.parametrize("confidence", [-torch.inf, torch.inf, torch.nan, -1e300, 0.0])
def test_every_step_fills_in_a_mask_and_changes_nothing_else(confidence: float) -> None:
    block = Block([1, 2, 3], 6, MASK, Rules(quotas=[1]), torch.device("cpu"))
    candidates = Candidates(torch.full((6,), 5), torch.full((6,), confidence, dtype=torch.float64))

    for left in (2, 1, 0):
        block.refine(candidates)
        assert block.filled == 1
        assert block.ids[:3] == [1, 2, 3]
        assert block.ids.count(MASK) == left
    assert block.is_done(())
