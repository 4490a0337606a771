"""Everything that one client received, unsorted and unfiltered."""

import time
from dataclasses import dataclass, field

from tests.chaos.questions import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One received event.

    Attributes:
        choice: the index of the choice.
        index: the chunk's index in its answer, as sent.
        data: bytes that are not text.
        token_ids: None if the route does not send them.
        logprobs: of the sampled tokens, if sent.
        finish_reason: of the event that ends a choice; it has no index.
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
    """Everything that one client received for one request.

    Attributes:
        moments_s: the times of the request, and of each received event.
        usages: one for each usage that was sent.
        completions: how often the answer was declared complete.
        refusals: code and message of each error response, in order.
        resumed: how often it resumed, because a connection broke or a server was busy.
        position: the position to resume after, as the server sent it.
        left: the client disconnected on purpose.
        is_cancelled: the server said that it cancelled the request.
        gave_up: the reason why it has no answer; empty if it has one.
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
    is_cancelled: bool = False
    gave_up: str = ""

    def take(self, piece: Piece) -> None:
        self.moments_s.append(time.monotonic())
        self.pieces.append(piece)

    @property
    def longest_stall_s(self) -> float:
        """The longest silence, from the request to the end."""
        pairs = zip(self.moments_s, self.moments_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)

    def text_of(self, choice: int) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)

    def data_of(self, choice: int) -> bytes:
        return b"".join(piece.data for piece in self.pieces if piece.choice == choice)
