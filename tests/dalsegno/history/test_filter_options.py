import time
from datetime import UTC, datetime
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dalsegno.history import filter_options
from dalsegno.history.request_filter import RequestFilter
from dalsegno.history.summary import EVER_NS

SECOND_NS = 1_000_000_000


def parsed(*arguments: str) -> RequestFilter:
    found: list[RequestFilter] = []

    @click.command()
    @filter_options.of_requests
    def command(**choice: Any) -> None:
        found.append(filter_options.filter_of(**choice))

    result = CliRunner().invoke(command, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return found[0]


def test_no_option_accepts_everything() -> None:
    assert parsed() == RequestFilter()


def test_values_of_one_option_are_alternatives() -> None:
    found = parsed("--outcome", "failed", "--outcome", "open", "--rank", "0", "--rank", "12", "--code", "x")
    assert found.chosen == {
        "outcome": frozenset({"failed", "open"}),
        "rank": frozenset({0, 12}),
        "code": frozenset({"x"}),
    }


def test_what_is_left_out_is_named_by_its_kind() -> None:
    given = ("outcome=finished", "rank=1", "tenant=a=b", "text=zip", "tenant=")
    found = parsed(*(word for text in given for word in ("--not", text)))
    assert found.excluded == {
        "outcome": frozenset({"finished"}),
        "rank": frozenset({1}),
        "tenant": frozenset({"a=b", ""}),
    }
    assert found.excluded_texts == ("zip",)


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("30m", 1800.0), ("2h", 7200.0), ("7d", 604_800.0)]
)
def test_durations_have_a_unit(text: str, seconds: float) -> None:
    assert parsed("--slower-than", text).slower_than_s == pytest.approx(seconds)
    before = time.time_ns()
    since_ns = parsed("--since", text).since_ns
    assert before <= since_ns + int(seconds * SECOND_NS) <= time.time_ns()


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-20T12:35:03Z", datetime(2026, 11, 20, 12, 35, 3, tzinfo=UTC)),
        ("2026-11-20T12:35:03.605Z", datetime(2026, 11, 20, 12, 35, 3, 605_000, tzinfo=UTC)),
        ("2026-11-20T13:35:03+01:00", datetime(2026, 11, 20, 12, 35, 3, tzinfo=UTC)),
        ("2026-11-20 12:35", datetime(2026, 11, 20, 12, 35, tzinfo=UTC)),
        ("2026-11-20", datetime(2026, 11, 20, tzinfo=UTC)),
    ],
)
def test_a_time_without_a_zone_is_utc(text: str, at: datetime) -> None:
    found = parsed("--until", text)
    microseconds = round(at.timestamp() * 1_000_000)
    assert (found.since_ns, found.until_ns) == (0, microseconds * 1000)
    assert parsed("--since", text).until_ns == EVER_NS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--outcome", "lost"), "'finished', 'failed', 'rejected', 'cancelled', 'open'"),
        (("--rank", "-1"), "0<=x"),
        (("--rank", "two"), "not a valid integer"),
        (("--since", "yesterday"), "expected a time such as 2026-11-20T12:35:03Z"),
        (("--until", "2026-13-01"), "expected a time such as"),
        (("--since", "1e9h"), "expected a time such as"),
        (("--since", "99999999999d"), "expected a time such as"),
        (("--slower-than", "1.5"), "expected a duration such as 200ms"),
        (("--slower-than", "-1s"), "expected a duration such as 200ms"),
        (("--faster-than", "fast"), "expected a duration such as 200ms"),
        (
            ("--not", "finished"),
            "expected KIND=VALUE, with the kind outcome, code, tenant, model, rank, text",
        ),
        (("--not", "colour=red"), "expected KIND=VALUE"),
        (("--not", "outcome=lost"), "expected the outcome finished, failed"),
        (("--not", "rank=two"), "expected a rank: 0, 1, ..."),
        (("--not", "rank=" + "9" * 5000), "expected a rank"),
        (("--text", "  "), "found an empty one"),
        (("--not", "text="), "found an empty one"),
        (("--since", "1h", "--until", "2h"), "--since is not before --until"),
        (("--slower-than", "2s", "--faster-than", "1s"), "--slower-than is not below --faster-than"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_says_what_is_expected(
    arguments: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(click.UsageError) as refused:
        parsed(*arguments)
    assert expected in refused.value.format_message()
