"""`make serve` passes on its arguments, and leaves everything else to the configuration."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("told", "command"),
    [
        ((), ".venv/bin/dalsegno serve demo"),
        (("PORT=9000",), ".venv/bin/dalsegno serve demo --port 9000"),
        (("MODEL=./weights",), ".venv/bin/dalsegno serve ./weights"),
    ],
)
def test_serve_passes_a_port_only_when_it_is_told_one(told: tuple[str, ...], command: str) -> None:
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"PORT", "MODEL", "MAKEFLAGS", "MAKELEVEL"}
    }
    shown = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "serve", "PYTHON=python3", *told],
        cwd=Path(__file__).parents[1],
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert shown.stdout.splitlines()[-1].strip() == command
