"""The CPU nodes of language models that hear: windows that fit beside their text, and prompts around them.

A family says how many rows a window has in the prompt, what its encoder takes, and what is around it.
"""

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, Final

from models.base import MediaReader
from models.speech_to_text.mel import RATE
from models.speech_to_text.window_processing import Listening, WindowProcessing
from models.speech_to_text.windows import WindowOptions
from shared.errors import ClientError

WINDOW_S: Final = 300.0
"""The seconds of a window if a request does not say: a text appears, and is kept, every five minutes."""
_SEARCH_S: Final = 5.0
"""The seconds at the end of a window in which a pause is searched, as published with Qwen3-ASR."""


class HearingProcessing(WindowProcessing):
    """The CPU nodes of one checkpoint.

    Args:
        tokenizer: `tokenizers.Tokenizer`.
        ends: the tokens that end a text.
        options_type: of the family, with `window_seconds` and `max_window_tokens`.
        max_seq_len: the most tokens of a sequence: prompt, rows and text.
        media: reads the file.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Collection[int],
        options_type: type[WindowOptions],
        max_seq_len: int,
        media: MediaReader,
    ) -> None:
        super().__init__(tokenizer, ends, options_type, media)
        self._max_seq_len: Final = max_seq_len

    @abstractmethod
    def rows(self, samples: int) -> int:
        """The rows of a window of so many samples in the prompt. More samples have no fewer rows."""

    @abstractmethod
    def prompt(self, options: Any) -> list[int]:
        """The tokens in front of a text, with one token in the place of the rows.

        Raises:
            ClientError: the model cannot do what the options ask for.
        """

    def listening(self, options: Any) -> Listening:
        before = self.prompt(options)
        room = self._max_seq_len - len(before)
        seconds = options.window_seconds or self._seconds_in(room // 2)
        rows = self.rows(round(seconds * RATE))
        if rows >= room:
            raise ClientError(
                f"expected a prompt, a window of sound and its text in {self._max_seq_len} tokens "
                f"(max_seq_len), found {len(before)} tokens of a prompt, and {rows} of a window of "
                f"{seconds:g} s; ask with a smaller window_seconds or a shorter prompt, or serve the model "
                "with a larger max_seq_len",
                code="context_length_exceeded",
            )
        longest = round(seconds * RATE)
        return Listening(longest=longest, search=min(round(_SEARCH_S * RATE), longest // 2), before=before)

    def _seconds_in(self, rows: int) -> float:
        """The seconds of the longest window with so many rows at most, in whole seconds, at least one."""
        seconds = int(WINDOW_S)
        while seconds > 1 and self.rows(seconds * RATE) > rows:
            seconds -= 1
        return float(seconds)

    def most_tokens(self, options: Any, samples: int) -> int:
        before = len(self.prompt(options))
        room = self._max_seq_len - self.rows(samples) + 1
        most: int = min(before + options.max_window_tokens, room)
        return most
