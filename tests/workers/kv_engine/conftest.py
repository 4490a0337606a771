"""One torch thread per test: tiny models gain nothing from two, and parallel test runs share the cores."""

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM, load
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3() -> DecoderLM:
    """A node shared by all tests; their engines share nothing else."""
    return load(tiny_checkpoint("qwen3"))
