"""docs/request-fields.md has the table by which the gateway decides."""

from pathlib import Path

from dalsegno import request_fields_page
from gateway.openai.request_fields import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "request-fields.md"


def test_the_page_is_that_of_the_table() -> None:
    shown = PAGE.read_text()

    assert request_fields_page.page(shown) == shown, (
        "run python -m dalsegno.request_fields_page docs/request-fields.md"
    )
    for field in FIELDS:
        assert shown.count(f"\n| `{field.name}` |") == sum(one.name == field.name for one in FIELDS)


def test_what_stands_around_the_tables_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- accepted -->\nold\n<!-- end -->\nafter\n")

    request_fields_page.main(page)

    first, _, *table, _, last = page.read_text().splitlines()
    assert (first, last) == ("before", "after")
    assert any("`user`" in row for row in table)
    assert "old" not in table
