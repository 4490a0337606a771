"""Deployments shared by all tests that do not damage them: the demo, and random weights."""

from collections.abc import Iterator

import pytest

from tests.e2e import deploy
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[deploy.Running]:
    """`dalsegno serve demo` on a free port: `.url .nats_url .client .prefix .pids .data_dir`.

    Shared by the whole session. A test that kills roles or changes the log starts its own with
    `tests.e2e.deploy.serve`.
    """
    with deploy.serve(tmp_path_factory.mktemp("deployment")) as running:
        yield running


@pytest.fixture(scope="session")
def random_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[deploy.Running]:
    """The same with a checkpoint of random weights: answers vary, and are as long as requested."""
    folder = tmp_path_factory.mktemp("random")
    with deploy.serve(folder, model=str(tiny_checkpoint("qwen3"))) as running:
        yield running
