"""NIXL over UCX's own transports. No process forks off one with an agent: each way has a process of its own.

RDMA endpoints are not among what is tried here.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.e2e.clients import ROOT
from workers.data_plane.transports.nixl import interface_of

is_installed = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))


@pytest.mark.skipif(not is_installed, reason="NIXL is not installed: it is `dalsegno[rdma]`")
@pytest.mark.parametrize(
    ("transports", "selected"),
    [("tcp", ""), ("tcp,shm", "another_process or two_tensors")],
)
def test_nixl_keeps_the_contract(transports: str, selected: str) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "tests/workers/data_plane/contract_nixl.py",
            "-k",
            selected,
        ],
        cwd=ROOT,
        env={**os.environ, "UCX_TLS": transports, "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"


def test_an_address_without_an_interface_is_told_with_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"192\.0\.2\.1.*set UCX_NET_DEVICES"):
        interface_of("192.0.2.1")
