import re
from datetime import date
from pathlib import Path

import pytest

from dalsegno.gate import accepting
from dalsegno.gate.accepting import AcceptFileError
from tests.dalsegno.gate.test_differences import difference

TODAY = date(2027, 1, 31)
ENTRY = """
- event: node.ready
  field: walks[*].args.ignore_eos
  reason: the option ends
  author: mo
  expires: 2027-01-31
"""


def test_an_entry_accepts_its_group_and_nothing_else() -> None:
    other = difference("r2", field="placement.llm")
    found = accepting.judged([difference(), other], accepting.read(ENTRY, "f"), TODAY)
    assert found.open == [other]
    [(entry, accepted)] = found.accepted
    assert (entry.reason, entry.author, accepted) == ("the option ends", "mo", [difference()])
    assert (found.unused, found.expired) == ([], [])


def test_an_entry_with_values_accepts_that_change_only() -> None:
    entries = accepting.read(f"{ENTRY}  from: true\n  to: false\n", "f")
    back = difference(recorded=False, found=True)
    found = accepting.judged([difference(), back], entries, TODAY)
    assert found.open == [back]


def test_true_is_not_1() -> None:
    entries = accepting.read(f"{ENTRY}  from: 1\n", "f")
    assert accepting.judged([difference()], entries, TODAY).open == [difference()]


def test_an_entry_is_valid_to_the_end_of_its_day_and_then_accepts_nothing() -> None:
    entries = accepting.read(ENTRY, "f")
    assert not accepting.judged([difference()], entries, TODAY).expired
    late = accepting.judged([difference()], entries, date(2027, 2, 1))
    assert late.open == [difference()]
    assert [one.place for one in late.expired] == [1]
    assert late.unused == []


def test_the_file_of_the_manual_accepts_the_difference_of_the_manual() -> None:
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```text\n(- event.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert accepting.judged([difference()], accepting.read(block, "f"), TODAY).open == []


def test_an_entry_that_accepts_nothing_is_unused() -> None:
    found = accepting.judged([], accepting.read(ENTRY, "f"), TODAY)
    assert [one.place for one in found.unused] == [1]


def test_a_date_may_be_quoted_and_an_empty_file_has_no_entries() -> None:
    quoted = ENTRY.replace("2027-01-31", "'2027-01-31'")
    assert accepting.read(quoted, "f")[0].expires == TODAY
    assert accepting.read("", "f") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ENTRY.replace("reason: the option ends", "why: so"), "f, entry 1: unknown key 'why'"),
        (ENTRY.replace("  author: mo\n", ""), "f, entry 1: author is missing"),
        (ENTRY.replace("2027-01-31", "soon"), "f, entry 1: expires: expected a date"),
        (ENTRY.replace("2027-01-31", "2027-01-31T10:00:00"), "f, entry 1: expires: expected a date"),
        (ENTRY.replace("author: mo", "author: 7"), "f, entry 1: author: expected a text, found 7"),
        (ENTRY.replace("author: mo", "author: ' '"), "f, entry 1: author: expected a text"),
        (ENTRY + ENTRY, "f, entry 2: field: entry 1 has the same"),
        ("event: node.ready", "f: expected a list of entries, found a map"),
        ("- 3", "f, entry 1: expected keys event, field"),
        ("- [", "f is not YAML"),
        ("- expires: 2027-99-99", "f is not YAML"),
    ],
)
def test_a_malformed_file_is_refused_and_the_key_is_named(text: str, expected: str) -> None:
    with pytest.raises(AcceptFileError) as refused:
        accepting.read(text, "f")
    assert refused.value.message.startswith(expected)
