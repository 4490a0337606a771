"""The warning about the number of readers."""

import pytest

from shared.log.port import LogState
from shared.log.reader_capacity import reader_alarm


@pytest.mark.parametrize(
    ("readers", "most", "warns"), [(79, 100, False), (80, 100, True), (9_999, None, False)]
)
def test_the_warning_begins_at_four_fifths(readers: int, most: int | None, *, warns: bool) -> None:
    state = LogState(
        first_seq=1, last_seq=1, created_ns=1, messages=1, bytes=1, consumers=readers, max_consumers=most
    )
    alarm = reader_alarm(state)
    assert bool(alarm) is warns
    assert not warns or "80 of 100 readers" in alarm
