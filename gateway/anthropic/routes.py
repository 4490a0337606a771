"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's routes for chats."""

from dataclasses import replace
from typing import Final

from fastapi import APIRouter, Request, Response

from gateway.anthropic.answers import CountDocument, MessageDocument, MessageHead, MessageStream
from gateway.anthropic.request import AsChat, CountRequest, MessagesRequest, parse, parse_count
from gateway.http.bodies import body_schema, read_object
from gateway.media import parts
from gateway.media.intake import MediaIntake
from gateway.openai import requests as openai
from gateway.openai.answer_reader import AnswerParts
from gateway.openai.requests import ChatRequest
from gateway.openai.routes import chat_group
from gateway.openai.tokenization import as_echo
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.resume import StreamPosition
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from shared.errors import ClientError

MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
_ID_PREFIX: Final = "msg"


def anthropic_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["Anthropic"])
    intake = MediaIntake(gateway)

    @router.post(MESSAGES, summary="Answer a chat", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        asked = parse(await read_object(request))
        group, position = await _group(gateway, intake, request, asked)

        def make_format(recorded: SubmissionRecord) -> AnswerFormat:
            first = group.requests[0]
            head = MessageHead(
                request_id=group.request_id,
                model=first.model,
                parts=AnswerParts.of(gateway, first.inputs, is_shown=asked.shows_thoughts),
                stops=asked.stops,
            )
            return MessageStream(head, position) if group.is_stream else MessageDocument(head)

        return AnswerResponse(gateway, group, make_format)

    @router.post(COUNT_TOKENS, summary="Count the tokens of a chat", openapi_extra=body_schema(CountRequest))
    async def count_tokens(request: Request) -> Response:
        group, _ = await _group(gateway, intake, request, parse_count(await read_object(request)))
        group = replace(as_echo(group), route=COUNT_TOKENS)
        return AnswerResponse(gateway, group, lambda _: CountDocument())

    return router


async def _group(
    gateway: Gateway, intake: MediaIntake, request: Request, asked: AsChat
) -> tuple[RequestGroup, StreamPosition]:
    """The request on the log, and the position after which a stream of its answer begins.

    Raises:
        ClientError: it cannot be made, in the words of Anthropic's body.
    """
    try:
        placed = parts.place(asked.fields["messages"], check_modality=intake.check_modality)
        body = openai.parse(
            ChatRequest, {**asked.fields, "messages": placed.messages}, gateway.served.options
        )
        group, position = chat_group(gateway, body, request, MESSAGES, _ID_PREFIX)
        requests = await intake.attach(group.requests, placed.sources)
    except ClientError as error:
        raise asked.words.error(error) from error
    media_places = [asked.words.place(source.where) for source in placed.sources]
    return replace(group, requests=requests, media_places=media_places), position
