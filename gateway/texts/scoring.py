"""Scores of pairs of a query and a text: what `/v1/rerank` and `/v1/score` have in common.

A reranker gets queries and texts as they are, and emits a score for each pair. With a model that only makes
embeddings, one vector for each text, the score of a pair is the cosine of its embeddings.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import mul
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request

from gateway.errors import InvalidParamError
from gateway.media.intake import MediaIntake
from gateway.requests.response import DocumentFormat, RequestGroup
from gateway.requests.service import Gateway
from gateway.served_model import ServedModel
from gateway.texts.batches import batches_of
from gateway.texts.entries import Entry, EntryReader, places
from gateway.texts.fields import TextsRequest
from gateway.texts.rows import Embedding, Outputs, UnexpectedOutputError
from gateway.texts.submission import request_group
from models.base import EMBEDDING, SCORE
from shared.errors import ClientError
from shared.events import OutputChunk, Usage

_ID_PREFIX: Final = "score"


class NoScoresError(ClientError):
    """The model scores no texts."""

    code = "unsupported_modality"
    param = "model"

    def __init__(self, name: str, outputs: Sequence[str]) -> None:
        super().__init__(
            f"the model {name!r} scores no texts: its outputs are {', '.join(outputs)}; serve a reranker, or "
            "an encoder of texts"
        )


class Scores(Protocol):
    """The scores of an answer, of which the chunks arrive."""

    def push(self, choice: int, chunk: OutputChunk) -> None:
        """Add a chunk of the request `choice`."""
        ...

    def scores(self) -> Iterable[float]:
        """The score of each entry, in the order of the body.

        Raises:
            UnexpectedOutputError: the output does not fit the request.
        """
        ...


@dataclass(slots=True)
class ScoresDocument(DocumentFormat):
    """An answer that is made from the scores, by `document`."""

    scores: Scores
    document: Callable[[list[float], Usage], dict[str, Any]]

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self.scores.push(choice, chunk)
        return b""

    def complete(self, usage: Usage) -> Iterator[bytes]:
        found = []
        for score in self.scores.scores():
            found.append(score)
            yield b""  # other answers go on
        yield msgspec.json.encode(self.document(found, usage))


def check_scores(served: ServedModel) -> None:
    """Refuse a model that scores no texts.

    Raises:
        NoScoresError: it does not.
    """
    if SCORE not in served.outputs and not (EMBEDDING in served.outputs and served.takes_texts):
        raise NoScoresError(served.name, served.outputs)


def text_reader(name: str, intake: MediaIntake, most: int) -> EntryReader:
    """Return the reader of texts and images in the field `name`."""
    return EntryReader(
        name=name,
        check_modality=intake.check_modality,
        most=most,
        setting="gateway.max_documents",
        allows_more=True,
        takes_ids=False,
    )


async def scored(
    gateway: Gateway,
    intake: MediaIntake,
    http: Request,
    body: TextsRequest,
    queries: Sequence[Entry],
    entries: Sequence[Entry],
    *,
    route: str,
) -> tuple[RequestGroup, Scores]:
    """Return the requests that score entries, and the reader of their answer.

    `queries` are one for all entries, or one for each.

    Raises:
        ClientError: an image cannot be taken, or the chosen id is not valid.
    """
    if SCORE not in gateway.served.outputs:
        batches = batches_of([*queries, *entries])
        group = await request_group(
            gateway, intake, http, body, batches, modality=EMBEDDING, route=route, id_prefix=_ID_PREFIX
        )
        return group, _Similarities(Outputs(EMBEDDING, [batch.order for batch in batches]), len(queries))
    for query in queries:
        if query.image is not None:
            raise InvalidParamError(query.where, f"{query.where}: expected a text, found an image")
    batches = batches_of(entries, [query.text for query in queries])
    group = await request_group(
        gateway,
        intake,
        http,
        body,
        batches,
        modality=SCORE,
        route=route,
        id_prefix=_ID_PREFIX,
        query_places=places(queries),
    )
    return group, Outputs(SCORE, [batch.order for batch in batches])


@dataclass(slots=True)
class _Similarities:
    """Scores by the cosine of embeddings; the first `query_count` of these are those of the queries."""

    outputs: Outputs
    query_count: int

    def push(self, choice: int, chunk: OutputChunk) -> None:
        self.outputs.push(choice, chunk)

    def scores(self) -> Iterator[float]:
        found = self.outputs.embeddings()
        queries, entries = found[: self.query_count], found[self.query_count :]
        query = _unit(queries[0])
        for number, entry in enumerate(entries):
            if len(queries) > 1:
                query = _unit(queries[number])
            yield sum(map(mul, query, _unit(entry)))


def _unit(embedding: Embedding) -> list[float]:
    """The vector of an embedding, scaled to length 1.

    Raises:
        UnexpectedOutputError: it has several.
    """
    if embedding.is_multi:
        raise UnexpectedOutputError("expected one vector for each text, found a multi-vector embedding")
    [vector] = embedding.vectors
    length = sqrt(sum(map(mul, vector, vector)))
    return [x / length for x in vector] if length else list(vector)
