"""Entries of the user: messages of one or more lines, and commands.

A line that ends with a backslash continues, and a message between two lines of three quotes has any lines.
A message that begins with `/` is a command; `//` begins a message with a slash.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

QUOTES: Final = '"""'
PROMPT: Final = "> "
MORE: Final = ". "

ReadLine = Callable[[str], str]
"""Reads a line, behind a prompt. Raises EOFError at the end of the input."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and what stands behind its name."""

    name: str
    rest: str


def read_entry(read_line: ReadLine) -> str | Command:
    """Read the next message or command; an empty line is an empty message.

    Raises:
        EOFError: the input has ended.
    """
    line = read_line(PROMPT)
    if line.strip() == QUOTES:
        return _quoted(read_line)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + read_line(MORE)
    text = line.strip()
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, _, rest = text[1:].partition(" ")
    return Command(name, rest.strip())


def _quoted(read_line: ReadLine) -> str:
    lines: list[str] = []
    while (line := read_line(MORE)).strip() != QUOTES:
        lines.append(line)
    return "\n".join(lines).strip()
