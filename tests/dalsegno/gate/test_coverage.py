import ast
from pathlib import Path

import conductor.core
from dalsegno.gate import coverage, selection
from tests.conductor.script import SUBJECTS
from tests.dalsegno.gate.rich_log import rich_log
from tests.dalsegno.gate.test_selection import seen


def test_the_codes_are_those_that_the_conductor_writes() -> None:
    found = {
        keyword.value.value
        for path in Path(str(conductor.core.__file__)).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Failure"
        for keyword in node.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }
    assert found == set(coverage.CODES)


def test_what_is_known_and_was_not_in_the_sample_is_named() -> None:
    log = rich_log(1, "fsfs", 60)
    contents = selection.contents(log.records, SUBJECTS, "log")
    found = {
        one.name: one
        for one in coverage.covered(list(contents.requests.values()), [contents], [log.deployment])
    }
    assert set(found["layouts"].seen) | set(found["layouts"].unseen) == {
        f"llm {rank}, prepare {rank}" for rank in range(3)
    }
    types = found["event types"]
    unreadable = [one for one in contents.requests.values() if one.summary and one.summary.model is None]
    assert types.seen["request.submitted"] == len(contents.requests) - len(unreadable)
    assert "stream.sent" in types.unseen
    assert sorted((*types.seen, *types.unseen)) == coverage.event_types()
    assert found["outcomes"].seen["finished"]


def test_only_the_chosen_requests_are_covered() -> None:
    many = [seen(1, layout="llm 0"), seen(2, "cancelled", layout="llm 1")]
    outcomes = coverage.covered(many[:1], [], [])[1]
    assert outcomes.seen == {"finished": 1}
    assert outcomes.unseen == ["failed", "rejected", "cancelled"]
    assert coverage.line_of(outcomes) == (
        "coverage: outcomes, 1 of 4: finished (1); not failed, rejected, cancelled"
    )
