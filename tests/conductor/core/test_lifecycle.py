"""The lifecycle table is whole, and the docs show it as it is."""

import re
from pathlib import Path

from conductor.core.lifecycle import DECISIONS, FACTS, Phase, diagram

PAGE = Path(__file__).parents[3] / "docs" / "lifecycle.md"


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    found = re.search(r"```mermaid\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert found.group(1).strip() == diagram()
    for phase, facts in FACTS.items():
        assert f"| {phase} | {', '.join(sorted(fact.__name__ for fact in facts))} |" in page


def test_every_phase_that_has_not_ended_can_end() -> None:
    for phase in Phase:
        assert phase.ended == (phase not in DECISIONS)
        if not phase.ended:
            assert any(to.ended for to in DECISIONS[phase].values())


def test_nothing_counts_after_the_end() -> None:
    assert all(not phase.ended for phase in (*FACTS, *DECISIONS))
