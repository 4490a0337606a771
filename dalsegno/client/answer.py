"""The answer to a request: chunks as they arrive, and the whole."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dalsegno.client.media import Audio, Medium
from shared.events import TokenLogprobs, Usage
from shared.output_pieces import PieceAssembler, whole_metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of the answer.

    Attributes:
        index: its index among the answer's chunks, from 0; `resume` takes it as `after`.
        modality: `text`, or the modality of `data`: `audio`, `image`, ...
        text: the text; a chunk may have tokens and no text yet.
        data: the bytes of a modality other than text.
        token_ids: its tokens.
        logprobs: one per token id, if requested.
        is_echo: the chunk and its tokens are the prompt's.
        metadata: fields needed to read `data`, such as `sample_rate`.
        advisory: progress (its modality and a field of its metadata are `progress`) or a preview: no part of
            the answer. Its index is that of the chunk before it.
    """

    index: int
    modality: str = "text"
    text: str = ""
    data: bytes = field(default=b"", repr=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    is_echo: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    advisory: bool = False

    @property
    def audio(self) -> Audio:
        """The chunk as sound; its modality must be `audio`."""
        assert self.modality == "audio", f"this is {self.modality}"
        return _sound(self.data, self.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a complete answer."""

    finish_reason: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document and its relevance; `index` is its place among the documents that were given."""

    index: int
    score: float
    document: str


def ranked(documents: Sequence[str], scores: Sequence[float]) -> list[Ranked]:
    """Return the documents, the most relevant first; equal ones stay in their order."""
    found = [
        Ranked(index=index, score=score, document=document)
        for index, (document, score) in enumerate(zip(documents, scores, strict=True))
    ]
    return sorted(found, key=lambda one: -one.score)


@dataclass(slots=True)
class Answer:
    """An answer; for a running stream, the answer so far.

    Attributes:
        finish_reason: `stop` or `length`; None while it is not complete.
        logprobs: one per token id, if requested.
        prompt_token_ids, prompt_logprobs: the same for the prompt, if an echo was requested.
        media: modalities other than text, each in order of arrival; a large tensor in one piece.
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
    _pieces: PieceAssembler[bytes] = field(default_factory=PieceAssembler, repr=False)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def images(self) -> list[Medium]:
        return self.media.get("image", [])

    def tensors(self, modality: str) -> list[Any]:
        """The NumPy arrays of a modality, in order (see `Medium.numpy`)."""
        return [medium.numpy() for medium in self.media.get(modality, [])]

    @property
    def audio(self) -> Audio | None:
        """All sound, in one piece."""
        pieces = self.media.get("audio", [])
        return _sound(b"".join(one.data for one in pieces), pieces[0].metadata) if pieces else None

    @property
    def embedding(self) -> list[float] | None:
        """The embedding vector, if requested."""
        pieces = self.media.get("embedding", [])
        if not pieces:
            return None
        data = b"".join(one.data for one in pieces)
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    @property
    def embeddings(self) -> list[list[float]] | None:
        """The embeddings of several texts, if requested; of a multi-vector model the vectors of all texts."""
        pieces = self.media.get("embedding", [])
        if not pieces:
            return None
        size = pieces[0].metadata["shape"][-1]
        return [[*row] for one in pieces for row in struct.iter_unpack(f"<{size}f", one.data)]

    @property
    def multi_vectors(self) -> list[list[list[float]]] | None:
        """The vectors of each text by a multi-vector model, if requested."""
        counts = b"".join(one.data for one in self.media.get("vectors", []))
        if not counts or self.embeddings is None:
            return None
        vectors = iter(self.embeddings)
        return [[*islice(vectors, count)] for (count,) in struct.iter_unpack("<i", counts)]

    @property
    def scores(self) -> list[float] | None:
        """The score of each text, if requested."""
        pieces = self.media.get("score", [])
        if not pieces:
            return None
        data = b"".join(one.data for one in pieces)
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    @property
    def hidden_states(self) -> list[list[float]] | None:
        """A vector for each token of the prompt, if requested."""
        pieces = self.media.get("hidden_states", [])
        if not pieces:
            return None
        size = pieces[0].metadata["shape"][1]
        return [[*row] for one in pieces for row in struct.iter_unpack(f"<{size}f", one.data)]

    def take(self, chunk: Chunk) -> None:
        """Append the next chunk."""
        if chunk.is_echo:
            self.prompt_token_ids += chunk.token_ids
            self.prompt_logprobs = _joined(self.prompt_logprobs, chunk.logprobs)
        else:
            self.token_ids += chunk.token_ids
            self.logprobs = _joined(self.logprobs, chunk.logprobs)
        if chunk.modality == "text":
            self._texts.append(chunk.text)
        elif (pieces := self._pieces.push(chunk.metadata, chunk.data)) is not None:
            medium = Medium(b"".join(pieces), whole_metadata(chunk.metadata))
            self.media.setdefault(chunk.modality, []).append(medium)

    def finish(self, end: End) -> None:
        """Complete the answer."""
        self.finish_reason, self.usage = end.finish_reason, end.usage


def _joined(
    before: list[TokenLogprobs] | None, more: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    return before if more is None else [*(before or []), *more]


def _sound(pcm: bytes, metadata: dict[str, Any]) -> Audio:
    return Audio(pcm, int(metadata.get("sample_rate", 24_000)), int(metadata.get("num_channels", 1)))
