"""The configuration page shows what the structs say."""

import re
from pathlib import Path

import msgspec
import pytest

from configs.deployment import SECTIONS, DeploymentConfig, GatewaySettings, NodeGroup
from dalsegno.config import reference
from models import registry
from shared.docstrings import meanings_of

KINDS: list[type[msgspec.Struct]] = [DeploymentConfig, NodeGroup, *SECTIONS.values()]
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_what_the_generator_writes() -> None:
    shown = PAGE.read_text(encoding="utf-8")

    assert reference.page(shown) == shown, "run python -m dalsegno.config.reference docs/configuration.md"
    for kind in KINDS:
        assert f"<!-- keys of {kind.__name__} -->\n{reference.table(kind)}<!-- end -->" in shown


def test_what_stands_around_the_tables_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- keys of LogSettings -->\nold\n<!-- end -->\nbehind\n")

    reference.main(page)

    first, _, *rows, _, last = page.read_text().splitlines()
    assert (first, last) == ("before", "behind")
    assert rows[2].startswith("| `level` | ")


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning_and_nothing_else_has(kind: type[msgspec.Struct]) -> None:
    assert list(meanings_of(kind)) == [field.name for field in msgspec.structs.fields(kind)]


def test_every_family_is_told_of_with_its_nodes_and_settings() -> None:
    page = PAGE.read_text(encoding="utf-8")
    [nodes] = re.findall(r"<!-- nodes of the families -->\n(.*?)<!-- end -->", page, re.DOTALL)
    ours = [name for name, package in registry.families().items() if package.startswith("models.")]

    assert {"decoder_lm", "orpheus", "vjepa2"} <= {*ours}
    for family in ours:
        graph = registry.graph(family)
        [row] = [row for row in nodes.splitlines() if f"`{family}`" in row.split("|")[1]]
        assert all(f"`{node}`" in row for node in graph.nodes)
        assert all(f"`{node}` (optional)" in row for node in graph.optional)
        assert all(f"\n| `{name}` | " in page for name in graph.kwargs)


def test_a_row_tells_type_bounds_and_default() -> None:
    rows = reference.table(GatewaySettings)

    assert (
        "| `port` | integer, 0 to 65535 | `8000` | the port to listen on; 0 chooses a free one. |\n" in rows
    )
    assert "| `cors_origins` | list of strings | `[]` | " in rows
    assert "| `api_keys_file` | string | none | " in rows
    assert "| `idle_timeout_s` | number, above 0 up to 604800 | `75` | " in rows
