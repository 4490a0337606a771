"""The tokens of an answer's content: those whose text is neither reasoning nor a call."""

from collections import deque

import msgspec

from gateway.openai.answer_reader import AnswerReader
from gateway.openai.logprobs import ListedToken, TokenList
from shared.events import OutputChunk


class ContentTokens:
    """Finds the tokens that wrote the content of one choice. A fold over its chunks.

    A token that wrote a mark and the first character behind it belongs to the content, as one whose
    characters are cut off by the limit does.

    Args:
        reader: a reader of the answer of its own; None if its text is all there is.
    """

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._tokens = TokenList()
        self._waiting: deque[ListedToken] = deque()  # their place in the answer is not decided yet
        self._read = 0  # characters
        self._content_end = 0  # where the last content ended

    def push(self, chunk: OutputChunk) -> list[ListedToken]:
        """The tokens of the content that a chunk adds."""
        self._waiting.extend(self._tokens.add(chunk))
        if self._reader is None:
            return self._take(0, self._tokens.chars)
        found: list[ListedToken] = []
        for character in chunk.text or [""]:  # one at a time: content that is found ends where it stands
            delta = self._reader.push(msgspec.structs.replace(chunk, text=character))
            self._read += len(character)
            found += self._behind(delta.get("content", ""))
        return found

    def end(self, finish_reason: str) -> list[ListedToken]:
        """The tokens of the content that the end of the text adds."""
        self._waiting.extend(self._tokens.end(finish_reason))
        if self._reader is None:
            return list(self._waiting)
        found = self._behind(self._reader.end().get("content", ""))
        return found + (list(self._waiting) if self._content_end == self._read else [])

    def _behind(self, content: str) -> list[ListedToken]:
        """The tokens of content that the reader has just found."""
        if not content:
            return []
        assert self._reader is not None
        self._content_end = end = self._read - self._reader.held
        return self._take(end - len(content), end)

    def _take(self, start: int, end: int) -> list[ListedToken]:
        """The tokens of the text's characters `start` to `end`; those before it belong to no content."""
        found = []
        while self._waiting and self._waiting[0].offset < end:
            token = self._waiting.popleft()
            if token.end > start or token.offset >= start:
                found.append(token)
        return found
