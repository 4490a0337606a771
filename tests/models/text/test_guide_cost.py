"""Divisors that would take the grammar library long are refused at once, usual ones are not."""

from typing import Any

import pytest

from models.text.guide_cost import problem_of_multiples


@pytest.mark.parametrize("divisor", [2, 0.01, 0.05, 60, 1000, 3600, 86_400, 65_536, 10**9, 7919, 1e-6, 1e300])
def test_usual_divisors_pass(divisor: float) -> None:
    assert not problem_of_multiples({"type": "number", "multipleOf": divisor})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 104_729},
        {"anyOf": [{"multipleOf": 10_007 + 2 * n} for n in range(4)]},
        {"properties": {"a": {"items": {"multipleOf": 1.000003}}}},
        {"$defs": {"multipleOf": {"multipleOf": 99_991 * 8}}},
    ],
)
def test_large_divisors_are_refused(schema: dict[str, Any]) -> None:
    assert "add up to at most 30000, found" in problem_of_multiples(schema)


@pytest.mark.parametrize("schema", [None, True, {}, {"multipleOf": "x"}, {"properties": {"multipleOf": {}}}])
def test_other_values_pass(schema: Any) -> None:
    assert not problem_of_multiples(schema)
