"""One real deployment of the demo model for all tests that do not harm it."""

from collections.abc import Iterator

import pytest

from tests.e2e import deploy


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[deploy.Running]:
    """`dalsegno serve demo` on a free port: `.url .nats_url .nats_token .prefix .pids .data_dir`.

    Shared by the whole session. A test that kills roles or changes the log starts its own with
    `tests.e2e.deploy.serve`.
    """
    with deploy.serve(tmp_path_factory.mktemp("deployment")) as running:
        yield running
