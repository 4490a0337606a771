"""Separates the reasoning of an answer from its content, while it is written. Pure."""

from enum import Enum, auto

from models.text.harmony import HarmonyParser
from models.text.reasoning import HARMONY, Parted, ReasoningFormat


def parser_for(found: ReasoningFormat, *, is_inside: bool) -> "ReasoningParser | HarmonyParser":
    """A parser of one answer, which begins within the reasoning if `is_inside`."""
    return HarmonyParser() if found is HARMONY else ReasoningParser(found, is_inside=is_inside)


class _State(Enum):
    BEFORE = auto()
    """Nothing but white space, or a part of the opening mark."""
    OPENED = auto()
    """White space behind the opening mark."""
    INSIDE = auto()
    CLOSED = auto()
    """White space behind the closing mark."""
    CONTENT = auto()


class ReasoningParser:
    """Parts one answer. A fold over its text: how that is cut into pieces makes no difference.

    White space around the reasoning belongs to neither part. An answer that does not begin with reasoning is
    content as a whole.

    Args:
        is_inside: the answer begins within the reasoning.

    Attributes:
        has_reasoned: the reasoning has begun.
    """

    def __init__(self, found: ReasoningFormat, *, is_inside: bool) -> None:
        self._opens = found.opens
        self._closes = found.closes
        self._state = _State.OPENED if is_inside else _State.BEFORE
        self._held = ""
        self.has_reasoned = is_inside

    @property
    def is_inside(self) -> bool:
        """The closing mark is still to come."""
        return self._state in (_State.OPENED, _State.INSIDE)

    @property
    def has_ended(self) -> bool:
        """All further text is content."""
        return self._state in (_State.CLOSED, _State.CONTENT)

    @property
    def held(self) -> int:
        """The number of the last characters that belong to no part yet."""
        return len(self._held)

    def push(self, text: str) -> Parted:
        """The new parts after the next piece."""
        self._held += text
        parted = Parted()
        while self._held and self._step(parted):
            pass
        return parted

    def end(self) -> Parted:
        """The parts that were held back."""
        held, self._held = self._held, ""
        if self._state is _State.BEFORE:
            return Parted(content=held)
        return Parted(reasoning=held.rstrip()) if self._state is _State.INSIDE else Parted()

    def _step(self, parted: Parted) -> bool:
        """Read what is held; true if the state has changed."""
        state = self._state
        match state:
            case _State.BEFORE:
                text = self._held.lstrip()
                if text.startswith(self._opens):
                    self._held = text[len(self._opens) :]
                    self._state = _State.OPENED
                    self.has_reasoned = True
                elif not self._opens.startswith(text):
                    self._state = _State.CONTENT
            case _State.OPENED | _State.CLOSED:
                self._held = self._held.lstrip()
                if self._held:
                    self._state = _State.INSIDE if state is _State.OPENED else _State.CONTENT
            case _State.INSIDE:
                self._read_reasoning(parted)
            case _State.CONTENT:
                parted.content += self._held
                self._held = ""
        return self._state is not state

    def _read_reasoning(self, parted: Parted) -> None:
        text, mark, rest = self._held.partition(self._closes)
        if mark:
            parted.reasoning += text.rstrip()
            self._held = rest
            self._state = _State.CLOSED
            return
        longest = min(len(text), len(self._closes) - 1)
        begun = next(n for n in range(longest, -1, -1) if text.endswith(self._closes[:n]))
        known = text[: len(text) - begun].rstrip()
        parted.reasoning += known
        self._held = text[len(known) :]
