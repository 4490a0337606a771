"""`/v1/responses`: OpenAI's route for answers that are kept, continued, and made in the background.

POST   /v1/responses                    a new response: whole, streamed, or in the background
POST   /v1/responses/input_tokens       the number of tokens of its prompt
GET    /v1/responses/{id}               a response; with `stream` its events, behind `starting_after`
GET    /v1/responses/{id}/input_items   what it was asked
POST   /v1/responses/{id}/cancel        cancel one in the background
DELETE /v1/responses/{id}               cancel and delete it
"""

from dataclasses import replace
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from gateway import errors
from gateway.client_key import key_name
from gateway.errors import ErrorResponse, InvalidParamError
from gateway.http.bodies import body_schema, read_object
from gateway.http.pages import item_page
from gateway.media import parts
from gateway.media.intake import MediaIntake
from gateway.openai import requests as openai
from gateway.openai.requests import ChatRequest
from gateway.openai.routes import chat_group
from gateway.openai.tokenization import as_echo
from gateway.requests.acceptance import submit_without_reader
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.response import AnswerFormat, AnswerResponse, DocumentFormat, RequestGroup
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.responses.answers import ResponseDocument, ResponseHead, ResponseStream
from gateway.responses.conversations.items import messages_of
from gateway.responses.conversations.store import StoredConversations
from gateway.responses.conversations.turns import NewTurn
from gateway.responses.items import items_of
from gateway.responses.request import AsChat, ResponsesRequest, as_chat, parse
from gateway.responses.store import StoredResponse, StoredResponses
from shared.errors import ClientError
from shared.events import Usage
from shared.ids import parse_request_id

RESPONSES: Final = "/v1/responses"
_ID_PREFIX: Final = "resp"
_WEEK_S: Final = 604_800.0
"""The disconnect grace of a response in the background: it needs no reader."""
_SERVER_ERRORS: Final = 500


class _InputTokens(DocumentFormat):
    """The number of a prompt's tokens."""

    def complete(self, usage: Usage) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": usage.prompt_tokens})


def response_routes(gateway: Gateway, second: SecondLog) -> APIRouter:
    """The routes of one gateway; `second` is its connection for events of conversations."""
    router = APIRouter(prefix=RESPONSES, tags=["OpenAI"])
    _add_new(router, gateway, second)
    _add_stored(router, gateway)
    return router


def _add_new(router: APIRouter, gateway: Gateway, second: SecondLog) -> None:
    intake = MediaIntake(gateway)

    async def group_of(request: Request, route: str) -> tuple[AsChat, RequestGroup, NewTurn | None]:
        asked = parse(await read_object(request), gateway.served.name)
        tenant = key_name(request.scope)
        stored = StoredResponses(gateway, tenant)
        turn = None
        earlier: list[dict[str, Any]] = []
        asked = msgspec.structs.replace(
            asked,
            model=gateway.served.own_name(asked.model or ""),  # as it is read again
            input=await stored.resolved(asked.input),
        )
        if asked.conversation_id is not None:
            turn = await NewTurn.of(StoredConversations(gateway, second, tenant), asked)
            earlier = messages_of(turn.read.items)
        elif asked.previous_response_id is not None:
            earlier = await stored.messages(asked.previous_response_id)
        chat = as_chat(asked, earlier)
        try:
            return chat, await _group(gateway, intake, request, chat, route), turn
        except ClientError as error:
            raise chat.words.error(error) from error

    @router.post("", summary="Make a response", openapi_extra=body_schema(ResponsesRequest))
    async def create(request: Request) -> Response:
        chat, group, turn = await group_of(request, RESPONSES)
        api_fields = chat.api_fields()
        group = replace(group, requests=[replace(one, api_fields=api_fields) for one in group.requests])
        if turn is not None:
            gateway.check_open()  # a request that is refused is no turn
            await turn.begin(group.request_id)
        if chat.asked.background and not group.is_stream:
            return await _in_background(gateway, request, group)
        if chat.asked.background:
            group = replace(
                group, requests=[replace(one, disconnect_grace_s=_WEEK_S) for one in group.requests]
            )

        def make_format(recorded: SubmissionRecord) -> AnswerFormat:
            head = ResponseHead.of(gateway, group.request_id, recorded.created_s, group.requests[0])
            return ResponseStream(head) if group.is_stream else ResponseDocument(head)

        return AnswerResponse(gateway, group, make_format)

    @router.post(
        "/input_tokens", summary="Count the tokens of a prompt", openapi_extra=body_schema(ResponsesRequest)
    )
    async def input_tokens(request: Request) -> Response:
        route = f"{RESPONSES}/input_tokens"
        _, group, _ = await group_of(request, route)
        return AnswerResponse(gateway, replace(as_echo(group), route=route), lambda _: _InputTokens())


def _add_stored(router: APIRouter, gateway: Gateway) -> None:
    def stored(request: Request) -> StoredResponses:
        return StoredResponses(gateway, key_name(request.scope))

    @router.get("/{response_id}", summary="A response, or its events")
    async def retrieve(
        request: Request, response_id: str, stream: bool = False, starting_after: int = -1
    ) -> Response:
        responses = stored(request)
        found = await responses.one(response_id)
        if stream:
            return _again(gateway, found, starting_after)
        if starting_after != -1:
            raise InvalidParamError("starting_after", "starting_after: expected none unless stream is true")
        return _json(await responses.document(found))

    @router.get("/{response_id}/input_items", summary="What a response was asked")
    async def input_items(
        request: Request, response_id: str, limit: int = 20, order: str = "desc", after: str = ""
    ) -> dict[str, Any]:
        responses = stored(request)
        items = items_of(responses.own_messages(await responses.one(response_id)), f"{response_id}-in")
        return item_page(items, limit, order, after)

    @router.post("/{response_id}/cancel", summary="Cancel a response in the background")
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        responses = stored(request)
        await responses.cancel(await responses.one(response_id))
        return await responses.document(await responses.one(response_id))

    @router.delete("/{response_id}", summary="Cancel and delete a response")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        responses = stored(request)
        await responses.delete(await responses.one(response_id))
        return {"id": response_id, "object": "response.deleted", "deleted": True}


async def _group(
    gateway: Gateway, intake: MediaIntake, request: Request, chat: AsChat, route: str
) -> RequestGroup:
    placed = parts.place(chat.chat.messages, check_modality=intake.check_modality)
    body = openai.parse(ChatRequest, {**chat.fields, "messages": placed.messages}, gateway.served.options)
    group, _ = chat_group(gateway, body, request, route, _ID_PREFIX)
    requests = await intake.attach(group.requests, placed.sources)
    places = [chat.words.place(source.where) for source in placed.sources]
    return replace(group, requests=requests, media_places=places)


async def _in_background(gateway: Gateway, http: Request, group: RequestGroup) -> Response:
    """Store a response on the log; return it as OpenAI does, queued."""
    [parsed] = group.requests
    await submit_without_reader(gateway, http, parsed)
    responses = StoredResponses(gateway, parsed.tenant)
    found = await responses.one(parsed.request_id)
    failure = found.part.failure
    if failure is not None and failure.status < _SERVER_ERRORS:
        return ErrorResponse(errors.of_failure(failure, {"files": group.media_places}, {}))
    if failure is not None or parsed.id_is_chosen:  # one with a chosen id may have run before
        return _json(await responses.document(found))
    return _json(found.head(gateway).document("queued"))


def _json(document: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _again(gateway: Gateway, found: StoredResponse, after: int) -> Response:
    """The events of a response that is on the log, behind a number."""
    event = found.event
    parsed = ParsedRequest(
        request_id=parse_request_id(found.part.id),
        id_is_chosen=True,
        model=event.model,
        inputs=event.inputs,
        params=event.params,
        created_s=event.created_s or 0,
        is_resumed=True,
        disconnect_grace_s=_WEEK_S if event.api_fields.get("background") else 0.0,
        priority=event.priority,
        tenant=event.tenant,
        api_fields=event.api_fields,
    )
    group = RequestGroup(route=f"{RESPONSES}/{{response_id}}", requests=[parsed], is_stream=True)
    head = found.head(gateway)
    return AnswerResponse(gateway, group, lambda _: ResponseStream(head, after, found.completed_s))
