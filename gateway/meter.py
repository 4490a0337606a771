"""What the gateway counts of the answers it gives; `/metrics` shows it.

An answer is observed from its submission to its end: one `Observation` per HTTP answer, whatever the number
of its choices.
"""

from shared.events import Usage


class Observation:
    """One answer while it is given."""

    def chunk(self, tokens: int) -> None:
        """A chunk with so many tokens was sent; the first one ends the time to first token."""

    def end(self, outcome: str, usage: Usage | None = None) -> None:
        """The answer ended: `finished`, or the code of the error it ended with. Once."""


class Meter:
    """The gateway's counters."""

    def begin(self, route: str) -> Observation:
        """An answer begins on `route`, the path's template."""
        return Observation()
