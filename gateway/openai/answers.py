"""OpenAI's answers: server-sent events or one document, for chats and completions.

Every server-sent event except the last, `[DONE]`, has as its `id` the stream's position after it
(`gateway.requests.resume`). A resumed stream continues after the position that the client sent, with the same
bytes that the uninterrupted stream would have had. A stream that fails midway ends with an `error` event and
without `[DONE]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from gateway.errors import HttpError
from gateway.http.lines import server_sent_event
from gateway.openai.answer_reader import TEXT_ALONE, AnswerParts, WholeMessage
from gateway.openai.logprobs import ListedToken, TokenList, chat_logprobs, completion_logprobs
from gateway.openai.outputs import ImageParts
from gateway.openai.sound import ChatSound, SoundReader
from gateway.openai.token_ids import ChoiceTokens, StreamUsage, ids_of
from gateway.requests.response import DocumentFormat
from gateway.requests.resume import StreamPosition
from gateway.requests.usage import parallel_tokens, usage_object
from shared.events import OutputChunk, Usage

_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that every event of one answer repeats, and the options of its format.

    Attributes:
        choices: the number of answers.
        with_logprobs: tokens are listed with their log probabilities.
        parts: what an answer may have besides text.
        sound: that of the answer; None for an answer without.
        shows_prompt: an echo of the prompt is a part of the text.
        with_token_ids: the ids of the tokens are listed.
        tokens_as_ids: tokens with log probabilities are written as their ids.
    """

    request_id: str
    model: str
    created_s: int
    choices: int = 1
    with_logprobs: bool = False
    parts: AnswerParts = TEXT_ALONE
    sound: ChatSound | None = None
    shows_prompt: bool = False
    with_token_ids: bool = False
    tokens_as_ids: bool = False

    def of(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
        }


class _Stream:
    """An answer as events: the text as it arrives, then the finish reason."""

    object_name: ClassVar[str]

    def __init__(
        self,
        head: AnswerHead,
        *,
        usage: StreamUsage = StreamUsage.NONE,
        position: StreamPosition | None = None,
    ) -> None:
        self.media_type = "text/event-stream; charset=utf-8"
        self._head = head
        self._usage = usage
        self._ids = [ChoiceTokens() for _ in range(head.choices)]
        self._position = position or StreamPosition.start(head.choices)
        self._tokens = [TokenList() for _ in range(head.choices)] if head.with_logprobs else None

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.is_echo and not self._head.shows_prompt:
            self._ids[choice].add(chunk)
            return b""
        listed = [] if self._tokens is None else self._tokens[choice].add(chunk)
        piece = self._read(choice, chunk)
        is_sent = self._position.has(choice, chunk.index)
        begin = b"" if is_sent else self._begin(choice)
        self._ids[choice].add(chunk)
        if is_sent:
            return b""
        ids = self._ids_with(choice, chunk)
        self._position.advance(choice, chunk.index)
        if piece is None and not listed and not ids:
            return begin
        return begin + self._choice_event(choice, (piece or self._piece("")) | ids, listed=listed)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        rest = [] if self._tokens is None else self._tokens[choice].end(finish_reason)
        piece, reason = self._last(choice, finish_reason)
        if self._position.has_ended(choice):
            return b""
        begin = self._begin(choice)
        self._position.end(choice)
        if self._head.with_token_ids:
            piece["token_ids"] = []
        return begin + self._choice_event(choice, piece, listed=rest, finish_reason=reason)

    def complete(self, usage: Usage) -> bytes:
        if self._usage is StreamUsage.NONE or self._position.is_complete:
            return _DONE
        self._position.complete()
        body = self._head.of(self.object_name) | {
            "choices": [],
            "usage": usage_object(usage, is_openais=True),
        }
        body |= parallel_tokens(usage)
        return server_sent_event(body, self._position) + _DONE

    def failed(self, error: HttpError) -> bytes:
        return server_sent_event(error.body)

    def _choice_event(
        self,
        choice: int,
        piece: dict[str, Any],
        *,
        listed: list[ListedToken] | None = None,
        finish_reason: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        found = _choice(choice, piece, finish_reason, self._logprobs(listed) if listed else None)
        body = self._head.of(self.object_name) | {"choices": [found], **(more or {})}
        if self._usage is not StreamUsage.NONE:
            body["usage"] = self._ids[choice].usage() if self._usage is StreamUsage.ALL else None
        return server_sent_event(body, self._position)

    def _begin(self, choice: int) -> bytes:
        """The event before the first piece of a choice, if any."""
        return b""

    def _ids_with(self, choice: int, chunk: OutputChunk) -> dict[str, Any]:
        """The ids that the event of a chunk lists, beside its piece."""
        return {"token_ids": ids_of(chunk)} if self._head.with_token_ids else {}

    def _read(self, choice: int, chunk: OutputChunk) -> dict[str, Any] | None:
        """The piece for the next chunk of a choice; None if nothing is sent yet."""
        return self._piece(chunk.text) if chunk.text else None

    def _last(self, choice: int, finish_reason: str) -> tuple[dict[str, Any], str]:
        """The last piece of a choice, and its finish reason."""
        return self._piece(""), finish_reason

    def _piece(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, listed: list[ListedToken]) -> dict[str, Any]:
        raise NotImplementedError


class ChatStream(_Stream):
    """A chat: each choice begins with its role. The text and the calls of one chunk are one event."""

    object_name = "chat.completion.chunk"

    def __init__(
        self,
        head: AnswerHead,
        *,
        usage: StreamUsage = StreamUsage.NONE,
        position: StreamPosition | None = None,
    ) -> None:
        super().__init__(head, usage=usage, position=position)
        self._readers = [head.parts.reader(head.request_id, n) for n in range(head.choices)]
        self._images = [ImageParts() for _ in range(head.choices)]
        self._sounds = [head.sound.reader(n) for n in range(head.choices)] if head.sound else []

    def _read(self, choice: int, chunk: OutputChunk) -> dict[str, Any] | None:
        if (image := self._images[choice].push(chunk)) is not None:
            return {"delta": {"images": [image]}}
        if self._sounds:
            delta = self._sounds[choice].delta(chunk)
            return {"delta": delta} if delta else None
        reader = self._readers[choice]
        if reader is None:
            return super()._read(choice, chunk)
        delta = reader.push(chunk)
        return {"delta": delta} if delta else None

    def _last(self, choice: int, finish_reason: str) -> tuple[dict[str, Any], str]:
        if self._sounds:
            return {"delta": self._sounds[choice].last_delta()}, finish_reason
        reader = self._readers[choice]
        if reader is None:
            return super()._last(choice, finish_reason)
        return {"delta": reader.end()}, reader.reason(finish_reason)

    def _begin(self, choice: int) -> bytes:
        if self._position.has_any(choice):
            return b""
        self._position.begin(choice)
        found: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        if not self._head.with_token_ids:
            return self._choice_event(choice, found)
        more = {"prompt_token_ids": self._ids[choice].prompt}
        return self._choice_event(choice, found | {"token_ids": []}, more=more)

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, listed: list[ListedToken]) -> dict[str, Any]:
        return chat_logprobs(listed, as_ids=self._head.tokens_as_ids)


class CompletionStream(_Stream):
    """A completion."""

    object_name = "text_completion"

    def _ids_with(self, choice: int, chunk: OutputChunk) -> dict[str, Any]:
        if not self._head.with_token_ids:
            return {}
        if chunk.is_echo:
            return {"prompt_token_ids": ids_of(chunk), "token_ids": []}
        found: dict[str, Any] = {"token_ids": ids_of(chunk)}
        is_first = not self._position.has_any(choice)
        return found | ({"prompt_token_ids": self._ids[choice].prompt} if is_first else {})

    def _piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, listed: list[ListedToken]) -> dict[str, Any]:
        return completion_logprobs(listed, as_ids=self._head.tokens_as_ids)


@dataclass(slots=True)
class _ChoiceParts:
    """The collected parts of one choice of a document."""

    message: WholeMessage
    tokens: TokenList = field(default_factory=TokenList)
    listed: list[ListedToken] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    reader: ImageParts = field(default_factory=ImageParts)
    sound: SoundReader | None = None
    finish_reason: str = ""
    ids: ChoiceTokens = field(default_factory=ChoiceTokens)


class _Document(DocumentFormat):
    """An answer as one JSON document."""

    object_name: ClassVar[str]

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        sound = head.sound
        self._choices = [
            _ChoiceParts(
                message=WholeMessage(head.parts.reader(head.request_id, n)),
                sound=sound.reader(n) if sound else None,
            )
            for n in range(head.choices)
        ]

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        parts = self._choices[choice]
        parts.ids.add(chunk)
        if chunk.is_echo and not self._head.shows_prompt:
            return b""
        parts.message.push(chunk)
        if (image := parts.reader.push(chunk)) is not None:
            parts.images.append(image)
        if parts.sound is not None:
            parts.sound.push(chunk)
        if self._head.with_logprobs:
            parts.listed += parts.tokens.add(chunk)
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        parts = self._choices[choice]
        parts.finish_reason = parts.message.end(finish_reason)
        parts.listed += parts.tokens.end(finish_reason)
        return b""

    def complete(self, usage: Usage) -> bytes:
        choices = [
            _choice(
                number,
                self._content(parts) | ({"token_ids": parts.ids.answer} if self._head.with_token_ids else {}),
                parts.finish_reason,
                self._logprobs(parts.listed) if self._head.with_logprobs else None,
            )
            for number, parts in enumerate(self._choices)
        ]
        body = self._head.of(self.object_name) | {
            "choices": choices,
            "usage": usage_object(usage, is_openais=True),
        }
        return msgspec.json.encode(body | parallel_tokens(usage) | self._more())

    def _more(self) -> dict[str, Any]:
        """Further fields of the document."""
        return {}

    def _content(self, parts: _ChoiceParts) -> dict[str, Any]:
        """The content of a choice."""
        raise NotImplementedError

    def _logprobs(self, listed: list[ListedToken]) -> dict[str, Any]:
        raise NotImplementedError


class ChatDocument(_Document):
    """A chat completion."""

    object_name = "chat.completion"

    def _more(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._choices[0].ids.prompt} if self._head.with_token_ids else {}

    def _content(self, parts: _ChoiceParts) -> dict[str, Any]:
        content = parts.message.content()
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None, **content}
        if parts.images:
            message["images"] = parts.images
        if parts.sound is not None:
            message |= {"content": None, "audio": parts.sound.whole(content["content"] or "")}
        return {"message": message}

    def _logprobs(self, listed: list[ListedToken]) -> dict[str, Any]:
        return chat_logprobs(listed, as_ids=self._head.tokens_as_ids)


class CompletionDocument(_Document):
    """A completion."""

    object_name = "text_completion"

    def _content(self, parts: _ChoiceParts) -> dict[str, Any]:
        found = {"text": parts.message.content()["content"]}
        return found | ({"prompt_token_ids": parts.ids.prompt} if self._head.with_token_ids else {})

    def _logprobs(self, listed: list[ListedToken]) -> dict[str, Any]:
        return completion_logprobs(listed, as_ids=self._head.tokens_as_ids)


def _choice(
    index: int, content: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
