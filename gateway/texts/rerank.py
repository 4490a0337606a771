"""`POST /v1/rerank`, `/rerank` and `/v2/rerank`: documents by their relevance to a query.

The bodies of Cohere, Jina and vLLM are accepted, and the answer has the fields of all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from gateway.http.bodies import body_schema, converted, read_object
from gateway.media.intake import MediaIntake
from gateway.requests.response import AnswerFormat, AnswerResponse
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.texts.fields import TextsRequest, prepared
from gateway.texts.scoring import ScoresDocument, check_scores, scored, text_reader
from shared.events import Usage

RERANK: Final = "/v1/rerank"
WITH_DOCUMENTS: Final = (RERANK, "/rerank")
"""The paths whose answers have the documents unless a request says otherwise, as those of Jina and vLLM."""
WITHOUT_DOCUMENTS: Final = ("/v2/rerank",)
"""Cohere's path, whose answers do not."""
_ALIASES: Final = {"top_k": "top_n"}
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {"rank_fields": (["text"],), "max_chunks_per_doc": ()}


class RerankRequest(TextsRequest, frozen=True, kw_only=True):
    """A query and documents.

    Attributes:
        query: a text, or an object with text or image.
        documents: texts, or objects with text or image; other fields of such an object are returned with it.
        top_n: the number of documents in the answer; None and 0 are all.
        return_documents: repeat the documents in the answer; None follows from the path.
        max_tokens_per_doc: as in `Params`.
    """

    query: Any
    documents: Any
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None


def rerank_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["texts"])
    intake = MediaIntake(gateway)

    async def rerank(request: Request) -> Response:
        fields = prepared(
            await read_object(request),
            RerankRequest,
            gateway.served.options,
            aliases=_ALIASES,
            neutral=_NEUTRAL,
        )
        body = converted(fields, RerankRequest)
        gateway.served.check_model(body.model)
        check_scores(gateway.served)
        query = text_reader("query", intake, 1).read_one(body.query)
        documents = text_reader("documents", intake, gateway.settings.max_documents).read(body.documents)
        route = request.url.path
        group, scores = await scored(gateway, intake, request, body, [query], documents, route=route)
        repeats = route in WITH_DOCUMENTS if body.return_documents is None else body.return_documents
        listed = body.documents if isinstance(body.documents, list) else [body.documents]

        def make_format(_: SubmissionRecord) -> AnswerFormat:
            def document(found: list[float], usage: Usage) -> dict[str, Any]:
                results = _results(found, body.top_n or len(found), listed if repeats else None)
                return _answer(group.request_id, gateway.served.name, results, usage)

            return ScoresDocument(scores, document)

        return AnswerResponse(gateway, group, make_format)

    for path in (*WITH_DOCUMENTS, *WITHOUT_DOCUMENTS):
        router.add_api_route(
            path,
            rerank,
            methods=["POST"],
            summary="Sort documents by their relevance to a query",
            openapi_extra=body_schema(RerankRequest),
        )
    return router


def _results(
    scores: Sequence[float], top_n: int, documents: Sequence[str | dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The best documents, the most relevant first; equal ones stay in their order."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if documents is None:
        return results
    for result in results:
        found = documents[result["index"]]
        result["document"] = {"text": found} if isinstance(found, str) else found
    return results


def _answer(request_id: str, model: str, results: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """The answer with the usage in the words of Jina, and of Cohere."""
    return {
        "id": request_id,
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens},
        "meta": {"tokens": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}},
    }
