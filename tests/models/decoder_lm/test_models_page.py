"""docs/models.md lists the same architectures as the tests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.models.decoder_lm.refused import REFUSED
from tests.tiny import MODELS

PAGE: Final = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")


def architectures(section: str) -> Iterator[str]:
    """The names in the first column of a section's table."""
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for row in re.findall(r"^\|([^|]+)\|", text, re.MULTILINE):
        yield from re.findall(r"`(\w+ForCausalLM)`", row)


def test_proven_architectures_are_those_of_the_oracle_tests() -> None:
    proven = {(model.architecture, model.config["model_type"]) for model in MODELS.values()}

    assert sorted(architectures("Proven")) == sorted(name for name, _ in proven)
    for name, model_type in proven:
        assert f"| `{name}` | `{model_type}` |" in PAGE


def test_refused_architectures_are_those_of_the_refusal_tests() -> None:
    tested = [refused.architecture for refused in REFUSED if refused.architecture]

    assert sorted(architectures("Refused")) == sorted(tested)
