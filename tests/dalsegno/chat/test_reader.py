"""What the user types: messages of several lines, and commands."""

from collections.abc import Iterable

import pytest

from dalsegno.chat.reader import Command, read_entry


def entry(lines: Iterable[str]) -> str | Command:
    rest = iter(lines)

    def read_line(_: str) -> str:
        for line in rest:
            return line
        raise EOFError

    return read_entry(read_line)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["hi"], "hi"),
        (["  hi  "], "hi"),
        ([""], ""),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""', "a", "", "/quit", '"""'], "a\n\n/quit"),
        (["/system Be brief. "], Command("system", "Be brief.")),
        (["/clear"], Command("clear", "")),
        (["//etc is a folder"], "/etc is a folder"),
    ],
)
def test_an_entry_is_a_message_or_a_command(lines: list[str], found: str | Command) -> None:
    assert entry(lines) == found


@pytest.mark.parametrize("lines", [[], ["a\\"], ['"""', "a"]])
def test_the_end_of_the_input_ends_an_entry(lines: list[str]) -> None:
    with pytest.raises(EOFError):
        entry(lines)
