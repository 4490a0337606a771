"""What comes back: chunks as they come, and the answer they amount to."""

import struct
from dataclasses import dataclass, field
from typing import Any

from dalsegno.client.media import Audio, Medium
from shared.events import TokenLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of the answer.

    Attributes:
        index: its place among the answer's chunks, from 0; what `resume` takes as `after`.
        modality: `text`, or what `data` holds: `audio`, `image`, ...
        text: the piece, where it is text; a chunk may have tokens and no text yet.
        data: the piece as bytes, where it is not text.
        token_ids: the tokens it was made of.
        logprobs: of `token_ids`, one for one, where they were asked for.
        is_echo: it is of the prompt, and so are its tokens.
        metadata: what is needed to read `data`, such as `sample_rate`.
    """

    index: int
    modality: str = "text"
    text: str = ""
    data: bytes = field(default=b"", repr=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    is_echo: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def audio(self) -> Audio:
        """The piece as sound, where it is sound."""
        assert self.modality == "audio", f"this is {self.modality}"
        return _sound(self.data, self.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The answer is complete."""

    finish_reason: str
    usage: Usage


@dataclass(slots=True)
class Answer:
    """An answer; of a stream that still runs, what there is of it so far.

    Attributes:
        finish_reason: `stop` or `length`; None while it is not complete.
        logprobs: of `token_ids`, one for one, where they were asked for.
        prompt_token_ids, prompt_logprobs: the same of the prompt, where an echo was asked for.
        media: what is not text, by modality, in the order it came.
    """

    request_id: str
    finish_reason: str | None = None
    usage: Usage | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    media: dict[str, list[Medium]] = field(default_factory=dict)
    _texts: list[str] = field(default_factory=list, repr=False)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def images(self) -> list[Medium]:
        return self.media.get("image", [])

    @property
    def audio(self) -> Audio | None:
        """All sound there is, in one piece."""
        pieces = self.media.get("audio", [])
        return _sound(b"".join(one.data for one in pieces), pieces[0].metadata) if pieces else None

    @property
    def embedding(self) -> list[float] | None:
        """The vector, where one was asked for."""
        pieces = self.media.get("embedding", [])
        if not pieces:
            return None
        data = b"".join(one.data for one in pieces)
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    @property
    def hidden_states(self) -> list[list[float]] | None:
        """A vector for each token of the prompt, where they were asked for."""
        pieces = self.media.get("hidden_states", [])
        if not pieces:
            return None
        size = pieces[0].metadata["shape"][1]
        return [[*row] for one in pieces for row in struct.iter_unpack(f"<{size}f", one.data)]

    def take(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        if chunk.is_echo:
            self.prompt_token_ids += chunk.token_ids
            self.prompt_logprobs = _joined(self.prompt_logprobs, chunk.logprobs)
        else:
            self.token_ids += chunk.token_ids
            self.logprobs = _joined(self.logprobs, chunk.logprobs)
        if chunk.modality == "text":
            self._texts.append(chunk.text)
        else:
            self.media.setdefault(chunk.modality, []).append(Medium(chunk.data, chunk.metadata))

    def finish(self, end: End) -> None:
        """Nothing comes any more."""
        self.finish_reason, self.usage = end.finish_reason, end.usage


def _joined(
    before: list[TokenLogprobs] | None, more: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    return before if more is None else [*(before or []), *more]


def _sound(pcm: bytes, metadata: dict[str, Any]) -> Audio:
    return Audio(pcm, int(metadata.get("sample_rate", 24_000)), int(metadata.get("num_channels", 1)))
