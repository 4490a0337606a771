"""`POST /v1/score` and `/score`: the scores of pairs of texts, in vLLM's words."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from gateway.errors import InvalidParamError
from gateway.http.bodies import body_schema, converted, read_object
from gateway.media.intake import MediaIntake
from gateway.requests.response import AnswerFormat, AnswerResponse
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.texts.fields import TextsRequest, prepared
from gateway.texts.scoring import ScoresDocument, check_scores, scored, text_reader
from shared.events import Usage

SCORES: Final = "/v1/score"
PATHS: Final = (SCORES, "/score")
_ALIASES: Final = {
    "queries": "text_1",
    "data_1": "text_1",
    "documents": "text_2",
    "items": "text_2",
    "data_2": "text_2",
}
"""vLLM's other names."""


class ScoreRequest(TextsRequest, frozen=True, kw_only=True):
    """Pairs of texts: one `text_1` for all of `text_2`, or one for each.

    Attributes:
        text_1: one or several texts, or objects with text or image.
        text_2: the same, each compared with its `text_1`.
        max_tokens_per_doc: as in `Params`.
    """

    text_1: Any
    text_2: Any
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None


def score_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["texts"])
    intake = MediaIntake(gateway)

    async def score(request: Request) -> Response:
        fields = prepared(
            await read_object(request), ScoreRequest, gateway.served.options, aliases=_ALIASES, neutral={}
        )
        body = converted(fields, ScoreRequest)
        gateway.served.check_model(body.model)
        check_scores(gateway.served)
        most = gateway.settings.max_documents
        queries = text_reader("text_1", intake, most).read(body.text_1)
        entries = text_reader("text_2", intake, most).read(body.text_2)
        if len(queries) not in {1, len(entries)}:
            raise InvalidParamError(
                "text_1",
                f"text_1: expected one text, or one for each of the {len(entries)} in text_2, "
                f"found {len(queries)}",
            )
        group, scores = await scored(gateway, intake, request, body, queries, entries, route=request.url.path)

        def make_format(recorded: SubmissionRecord) -> AnswerFormat:
            def document(found: list[float], usage: Usage) -> dict[str, Any]:
                return {
                    "id": group.request_id,
                    "object": "list",
                    "created": recorded.created_s,
                    "model": gateway.served.name,
                    **_results(found, usage),
                }

            return ScoresDocument(scores, document)

        return AnswerResponse(gateway, group, make_format)

    for path in PATHS:
        router.add_api_route(
            path,
            score,
            methods=["POST"],
            summary="Score pairs of texts",
            openapi_extra=body_schema(ScoreRequest),
        )
    return router


def _results(scores: Sequence[float], usage: Usage) -> dict[str, Any]:
    """The scores in the order of the pairs, and the usage."""
    return {
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens},
    }
