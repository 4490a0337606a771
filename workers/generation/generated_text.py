"""Generated text of one sequence: a fold over its token ids that yields the text and its end.

The state consists of the detokenizer and the stop matcher, both folds over the same token ids. A resumed
sequence therefore folds its earlier tokens again and continues with the same text. The module knows neither
the engine nor the log.
"""

from collections.abc import Collection, Sequence
from typing import Final

from models.base import Processing, TextDecoder
from models.sequence_request import SequenceRequest
from models.text.harmony import HarmonyParser
from models.text.reasoning import FORMATS as REASONING
from models.text.reasoning_parser import ReasoningParser, parser_for
from workers.generation.stop_strings import StopMatcher

STOP: Final = "stop"
LENGTH: Final = "length"


class _NoText:
    """A decoder of tokens that are no text, such as codes of sound."""

    def push(self, _token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def bytes_of(self, _token_id: int) -> bytes:
        return b""


class GeneratedText:
    """The text so far.

    Attributes:
        ids: the folded tokens, where they are kept; None otherwise.
        tokens: the number of folded tokens, including the token that ended the text.
        finish_reason: `stop` (an end-of-sequence token, a stop string, or a stop token) or `length`; None
            until the end.
        reasoning_tokens: how many of the tokens are reasoning, with its marks.
        stop_reason: the stop string, or the id of the token, that ended it; None if neither did.
    """

    __slots__ = (
        "_decoder",
        "_ends",
        "_matcher",
        "_max_tokens",
        "_reasoning",
        "finish_reason",
        "ids",
        "reasoning_tokens",
        "stop_reason",
        "tokens",
    )

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        max_tokens: int,
        eos_ids: Collection[int] = (),
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        keeps_ids: bool = False,
        reasoning: ReasoningParser | HarmonyParser | None = None,
    ) -> None:
        self.ids: list[int] | None = [] if keeps_ids else None
        self.tokens = 0
        self.finish_reason: str | None = None if max_tokens > 0 else LENGTH
        self.stop_reason: str | int | None = None
        self.reasoning_tokens = 0
        self._reasoning = reasoning
        self._decoder = decoder
        self._matcher = StopMatcher(stop)
        self._max_tokens = max_tokens
        self._ends = frozenset(stop_token_ids) | frozenset(() if ignore_eos else eos_ids)

    @classmethod
    def for_request(
        cls, processing: Processing, request: SequenceRequest, max_tokens: int, *, is_read: bool = True
    ) -> "GeneratedText":
        """An empty text with the end conditions of a request.

        Unless it `is_read`, or has stop strings, its tokens are only counted: they may be no text at all.
        """
        begins = request.reasoning
        return cls(
            processing.text_decoder() if is_read or request.stop else _NoText(),
            max_tokens=max_tokens,
            eos_ids=frozenset(processing.eos_ids),
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=request.stop_token_ids,
            stop=request.stop or (),
            keeps_ids=request.reports_ids,
            reasoning=None
            if begins is None or not is_read
            else parser_for(REASONING[begins.format], is_inside=begins.is_inside),
        )

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self._decoder.bytes_of(token_id)

    def push(self, token_id: int) -> str:
        """Fold one token; return the text that is now final. Do not call it after the end."""
        assert self.finish_reason is None, "a text that has ended takes no token"
        self.tokens += 1
        if self.ids is not None:
            self.ids.append(token_id)
        if token_id in self._ends:
            self.stop_reason = token_id
            return self._end(STOP)
        text = self._matcher.push(self._decoder.push(token_id))
        if self._matcher.matched:
            self.finish_reason, self.stop_reason = STOP, self._matcher.stop
        elif self.tokens >= self._max_tokens:
            text += self._end(LENGTH)
        if self._reasoning is not None:
            self._count_reasoning(self._reasoning, text)
        return text

    def _count_reasoning(self, reasoning: ReasoningParser | HarmonyParser, text: str) -> None:
        reasoning.push(text)
        if reasoning.has_reasoned:
            self.reasoning_tokens = self.tokens
        if reasoning.has_ended:
            self._reasoning = None

    def end_by_length(self) -> str:
        """End a text that takes no further token; return the held-back text, up to a stop string."""
        assert self.finish_reason is None, "a text ends once"
        return self._end(LENGTH)

    def _end(self, reason: str) -> str:
        """End the text; return the held-back text, up to a stop string."""
        text = self._matcher.push(self._decoder.flush()) + self._matcher.flush()
        if self._matcher.matched:  # the rest of the text completes a stop string, which begins earlier
            self.finish_reason, self.stop_reason = STOP, self._matcher.stop
        else:
            self.finish_reason = reason
        return text
