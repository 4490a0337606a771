"""A node that the tests of engines share."""

import pytest

from models.decoder_lm.nodes import DecoderLM, load
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="session")
def qwen3() -> DecoderLM:
    """A node shared by all tests; their engines share nothing else."""
    return load(tiny_checkpoint("qwen3"))
