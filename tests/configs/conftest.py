"""One torch thread: on busy cores two of them wait for each other at every barrier (20 times slower)."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
