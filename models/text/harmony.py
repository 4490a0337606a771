"""gpt-oss's answers ("harmony"): several messages, each with a header that names its channel. Pure.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It rains.
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

`analysis` is reasoning, `final` is the answer, `commentary` is what the model says before it calls a
function. A message to a function is a call, whose header a model writes in several ways; the parser writes it
in one, as content (`models.text.named_calls.HARMONY`).

Source: OpenAI's description of the format, https://github.com/openai/harmony.
"""

import re
from enum import Enum, auto
from typing import Final

from models.text.reasoning import Parted
from models.text.tagged_calls import held_back

_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS: Final = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "to=")
"""What the first header of an answer may begin with: the prompt ends with `<|start|>assistant`."""
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_GAP: Final = "\n\n"
"""What joins two messages of one kind."""


class _Kind(Enum):
    ANALYSIS = auto()
    TEXT = auto()
    FINAL = auto()
    CALL = auto()


class HarmonyParser:
    """Parts one answer, as `models.text.reasoning.ReasoningParser` does for other formats.

    Text that has no header is content.

    Attributes:
        has_reasoned: the reasoning has begun.
    """

    def __init__(self) -> None:
        self.has_reasoned = False
        self._kind: _Kind | None = None  # None: within a header
        self._is_first = True
        self._held = ""
        self._has_text = False

    @property
    def is_inside(self) -> bool:
        """The end of the reasoning is still to come."""
        return self._kind is _Kind.ANALYSIS

    @property
    def has_ended(self) -> bool:
        """All further text is content."""
        return self._kind in (_Kind.FINAL, _Kind.CALL)

    @property
    def held(self) -> int:
        """The number of the last characters that belong to no part yet."""
        return len(self._held)

    def push(self, text: str) -> Parted:
        """The new parts after the next piece."""
        self._held += text
        parted = Parted()
        while self._held and (self._read_header(parted) if self._kind is None else self._read_body(parted)):
            pass
        return parted

    def end(self) -> Parted:
        """The parts that were held back; of a header that has not ended there are none."""
        held, self._held = self._held, ""
        parted = Parted()
        if self._kind is not None:
            self._say(parted, held)
        elif self._is_first and not _begins(held.lstrip()):
            parted.content = held
        return parted

    def _read_header(self, parted: Parted) -> bool:
        """Read a header; true if it has ended."""
        if self._is_first:
            text = self._held.lstrip()
            if not _begins(text):
                self._is_first, self._kind = False, _Kind.FINAL
                return True
        header, mark, rest = self._held.partition("<|message|>")
        if not mark:
            return False
        self._is_first, self._held = False, rest
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._kind = _Kind.CALL
            parted.content += f"<|channel|>commentary to={recipient[1]} <|constrain|>json<|message|>"
        elif channel is not None and channel[1] == "analysis":
            self._kind = _Kind.ANALYSIS
            parted.reasoning += _GAP if self.has_reasoned else ""
            self.has_reasoned = True
        else:
            is_final = channel is not None and channel[1] == "final"
            self._kind = _Kind.FINAL if is_final else _Kind.TEXT
            parted.content += _GAP if self._has_text else ""
        return True

    def _read_body(self, parted: Parted) -> bool:
        """Read a message up to its end; true if that was found."""
        places = [(place, mark) for mark in _ENDS if (place := self._held.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            self._say(parted, self._held[:place])
            self._held = self._held[place + len(mark) :]
            self._kind = None
            return True
        count = len(self._held) - held_back(self._held, _ENDS)
        self._say(parted, self._held[:count])
        self._held = self._held[count:]
        return False

    def _say(self, parted: Parted, text: str) -> None:
        if self._kind is _Kind.ANALYSIS:
            parted.reasoning += text
            return
        self._has_text = self._has_text or bool(text)
        parted.content += text


def _begins(text: str) -> bool:
    """True if a text may be a part of a header."""
    return any(text.startswith(head) or head.startswith(text) for head in _HEADS)
