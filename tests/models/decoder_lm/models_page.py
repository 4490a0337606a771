"""Generator of the tables of architectures in docs/models.md, from the lists that the tests go through.

    $ python -m tests.models.decoder_lm.models_page

replaces the tables between their markers: the proven architectures are those of the tiny checkpoints that
the oracle tests compare with `generate`, the refused ones those of the tests of refusals.
"""

import re
from pathlib import Path
from typing import Final

from tests.models.decoder_lm.refused import REFUSED
from tests.tiny import MODELS

PAGE: Final = Path(__file__).parents[3] / "docs" / "models.md"
_TABLE: Final = re.compile(r"(<!-- (proven|refused) architectures -->\n).*?(<!-- end -->)", re.DOTALL)


def proven() -> str:
    """Return the table of architectures that the tests compare with `generate`."""
    shown: dict[tuple[str, str], list[str]] = {}
    for model in MODELS.values():
        shown.setdefault((model.architecture, model.config["model_type"]), []).append(model.proves)
    rows = (f"| `{name}` | `{kind}` | {'; '.join(said)} |\n" for (name, kind), said in sorted(shown.items()))
    return "| architecture | `model_type` | proven with |\n|---|---|---|\n" + "".join(rows)


def refused() -> str:
    """Return the table of architectures that the tests expect to be refused."""
    shown: dict[str, list[str]] = {}
    for one in REFUSED:
        if one.architecture:
            shown.setdefault(one.why, []).append(one.architecture)
    rows = (f"| {', '.join(names)} | {why} |\n" for why, names in shown.items())
    return "| architecture | why |\n|---|---|\n" + "".join(rows)


def page(text: str) -> str:
    """Return the page with regenerated tables."""
    tables = {"proven": proven(), "refused": refused()}
    return _TABLE.sub(lambda found: f"{found[1]}{tables[found[2]]}{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
