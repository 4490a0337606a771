"""Schemathesis over our own `/openapi.json`: the document describes each response."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.deploy import Running

_EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "10")
"""For each route. A soak takes thousands; here each of the rules is tried, which needs few."""
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="`make soak` installs schemathesis")
def test_every_answer_is_one_that_the_document_tells_of(deployment: Running, tmp_path: Path) -> None:
    # A limit of a nanosecond is over at once, and 504 is the right word for it.
    (tmp_path / "settings.toml").write_text(
        '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "4xx", "504"]\n'
    )
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", "settings.toml"),
            *("run", f"{deployment.url}/openapi.json"),
            *("--max-examples", _EXAMPLES, "--request-timeout", "30", "--checks", ",".join(_CHECKS)),
        ],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
