"""nats-py still has every private name that the project relies on, and no other module uses them."""

import ast
from importlib.metadata import version
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol import parser

import shared.log.nats
from shared.log.nats.nats_py_internals import CHECKED_WITH, PRIVATE_NAMES

FOLDER = Path(shared.log.nats.__file__).parent


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_nats_py_has_the_name(name: str) -> None:
    owner, _, attribute = name.partition(".")
    found = {"parser": parser, "Client": Client(), "TcpTransport": TcpTransport()}[owner]

    assert hasattr(found, attribute), f"nats-py {version('nats-py')}; the names fit {CHECKED_WITH}"


def test_the_list_is_complete_and_no_other_module_uses_a_private_name() -> None:
    private = {name for name in vars(Client()) | vars(Client) | vars(TcpTransport()) if name.startswith("_")}
    private -= {name for name in private if name.startswith("__")}
    listed = {name.partition(".")[2] for name in PRIVATE_NAMES}

    for file in FOLDER.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= {
            node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
        }
        if file.stem == "nats_py_internals":
            assert used & private <= listed
        elif "HookedClient" in file.read_text(encoding="utf-8"):
            assert not used & private
