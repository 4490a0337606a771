"""The import graph has no cycles, and the tree of ARCHITECTURE.md is complete."""

import re
from pathlib import Path
from typing import Final

import grimp
import pytest

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("configs", "conductor", "dalsegno", "gateway", "models", "shared", "workers")
TREE: Final = re.compile(r"^(?P<indent> *)(?P<name>[a-z0-9_]+)/ +(?P<line>\S.*)$")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """All imports, also those inside of functions and those for types alone."""
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_and_packages_beside_each_other_import_one_another_in_no_cycle(
    graph: grimp.ImportGraph, package: str
) -> None:
    parents = {package, *(one.rpartition(".")[0] for one in graph.find_descendants(package))}
    cycles = {parent: graph.nominate_cycle_breakers(parent) for parent in parents}

    assert {parent: breakers for parent, breakers in cycles.items() if breakers} == {}


def documented_packages() -> dict[str, str]:
    """Every package in the tree of ARCHITECTURE.md, with its line."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    [tree] = re.findall(r"^```tree\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in tree.splitlines():
        if match := TREE.match(line):
            depth = len(match["indent"])
            path = [(indent, name) for indent, name in path if indent < depth]
            path.append((depth, match["name"]))
            found["/".join(name for _, name in path)] = match["line"]
    return found


def test_the_tree_in_the_architecture_page_has_a_line_for_every_package_and_no_other() -> None:
    packages = {
        str(file.parent.relative_to(ROOT)) for top in PACKAGES for file in (ROOT / top).rglob("__init__.py")
    }

    assert set(documented_packages()) == packages
