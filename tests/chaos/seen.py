"""What a client was told, as it was told: nothing is sorted out or left out here."""

import time
from dataclasses import dataclass, field

from tests.chaos.questions import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One thing told.

    Attributes:
        choice: of which answer.
        index: the chunk's place in its answer, as the client was told.
        data: bytes of what is not text.
        token_ids: None where the route does not tell them.
        logprobs: of the tokens taken, where they are told.
        finish_reason: of the piece that ends an answer; it has no index.
    """

    choice: int = 0
    index: int | None = None
    text: str = ""
    data: bytes = b""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class Seen:
    """All that one client was told of one question.

    Attributes:
        moments_s: when it asked, and when each thing came.
        usages: one for each time it was told what the answer used.
        completions: how often the answer was said to be complete.
        refusals: answers that were none, in the order they came: code and message.
        resumed: how often it asked again, because a connection broke or a server had no time.
        position: what it would resume behind, in the server's words.
        left: it left of its own will.
        gave_up: why it has no answer; empty where it has.
    """

    request_id: str
    question: Question
    pieces: list[Piece] = field(default_factory=list)
    moments_s: list[float] = field(default_factory=list)
    usages: list[dict[str, int]] = field(default_factory=list)
    completions: int = 0
    refusals: list[tuple[str, str]] = field(default_factory=list)
    resumed: int = 0
    position: str | None = None
    left: bool = False
    gave_up: str = ""

    def take(self, piece: Piece) -> None:
        self.moments_s.append(time.monotonic())
        self.pieces.append(piece)

    @property
    def longest_stall_s(self) -> float:
        """The longest time without a word, from asking to the end."""
        pairs = zip(self.moments_s, self.moments_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)

    def text_of(self, choice: int) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)

    def data_of(self, choice: int) -> bytes:
        return b"".join(piece.data for piece in self.pieces if piece.choice == choice)
