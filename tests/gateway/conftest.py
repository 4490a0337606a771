"""Report at the end of the run how many bodies were checked against OpenAI's schema."""

import pytest

from tests.gateway.openai_schema import check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if check.COUNTS:
        statuses = ", ".join(f"{status} x {count}" for status, count in sorted(check.ERROR_STATUSES.items()))
        terminalreporter.write_line(
            f"held against OpenAI's schema: {check.COUNTS.total()} bodies; of errors: {statuses}"
        )
        for name, count in sorted(check.COUNTS.items()):
            terminalreporter.write_line(f"  {count:5} {name}")
