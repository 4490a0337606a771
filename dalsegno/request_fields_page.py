"""Generator of the tables in docs/request-fields.md, from `gateway.openai.request_fields`.

    $ python -m dalsegno.request_fields_page docs/request-fields.md

replaces the tables between their markers; the text around them is written by hand.
"""

import json
import re
import sys
from pathlib import Path
from typing import Final

from gateway.openai.request_fields import CHAT, COMPLETIONS, FIELDS, Field, Support

_TABLE: Final = re.compile(r"(<!-- (supported|accepted|refused) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with new tables."""
    return _TABLE.sub(lambda found: found[1] + table(Support(found[2])) + found[3], text)


def table(support: Support) -> str:
    """The table of the fields that are supported, accepted or refused."""
    head = "values that change nothing" if support is Support.REFUSED else ""
    lines = [f"| field | of | chat | completions | {head} |", "|---|---|---|---|---|"]
    lines += [_row(field) for field in FIELDS if field.support is support]
    return "\n".join(lines) + "\n"


def _row(field: Field) -> str:
    chat, completions = ("yes" if route in field.routes else "" for route in (CHAT, COMPLETIONS))
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    note = "; ".join(part for part in (values, field.note) if part)
    return f"| `{field.name}` | {field.servers} | {chat} | {completions} | {note} |"


def main(path: Path) -> None:
    """Rewrite the page at `path`."""
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
