"""Promises to users, the verdict of each after its attacks, and the table of all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_SHOWN: int = 300
"""The number of characters of an example in the table."""


@dataclass(frozen=True, slots=True)
class Break:
    """A broken promise.

    Attributes:
        attack: the attack that broke it.
        found: expected and found.
    """

    attack: str
    found: str

    def __str__(self) -> str:
        return f"{self.attack}: {self.found}"


@dataclass(slots=True)
class Verdict:
    """The result of all attacks on one promise.

    Attributes:
        attacks: the number of attacks tried.
        note: measurements, for the table.
        missing: the reason why the promise could not be attacked; empty if it was.
    """

    promise: str
    attacks: int = 0
    breaks: list[Break] = field(default_factory=list)
    note: str = ""
    missing: str = ""

    @property
    def is_held(self) -> bool:
        return not self.breaks and not self.missing

    def tried(self, count: int = 1) -> None:
        self.attacks += count

    def broken(self, attack: str, found: str) -> None:
        self.breaks.append(Break(attack, found))

    def expect(self, attack: str, found: object, expected: object) -> None:
        """Count an attack; it breaks the promise unless `found` equals `expected`."""
        self.tried()
        if found != expected:
            self.broken(attack, f"expected {expected!r:.120}, found {found!r:.120}")

    @contextmanager
    def survives(self, attack: str) -> Iterator[None]:
        """Count an attack; an exception within breaks the promise."""
        self.tried()
        try:
            yield
        except Exception as error:
            self.broken(attack, f"{type(error).__name__}: {error}")

    @property
    def result(self) -> str:
        if self.missing:
            return f"not attacked: {self.missing}"
        if not self.breaks:
            return "held"
        return f"BROKEN {len(self.breaks)} times, first: {self.breaks[0]}"


def table(verdicts: Sequence[tuple[str, Verdict]]) -> str:
    """The table of all promises, in Markdown; each with the family that attacked it."""
    lines = ["| family | promise | attacks | result | measured |", "|---|---|---|---|---|"]
    for family, one in verdicts:
        cells = (family, one.promise, str(one.attacks), one.result[:_SHOWN], one.note)
        lines.append(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    held = sum(one.is_held for _, one in verdicts)
    attacks = sum(one.attacks for _, one in verdicts)
    return "\n".join([*lines, "", f"{held} of {len(verdicts)} promises held under {attacks} attacks."])
