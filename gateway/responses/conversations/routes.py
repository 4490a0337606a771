"""`/v1/conversations`: OpenAI's route for the items that several responses have in common.

POST   /v1/conversations                    a new conversation, with or without items
GET    /v1/conversations/{id}
POST   /v1/conversations/{id}               other metadata
DELETE /v1/conversations/{id}               its responses stay
POST   /v1/conversations/{id}/items         more items
GET    /v1/conversations/{id}/items         its items, those of its responses included
GET    /v1/conversations/{id}/items/{item}
DELETE /v1/conversations/{id}/items/{item}
"""

from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request

from gateway.client_key import key_name
from gateway.errors import InvalidParamError
from gateway.http.bodies import Metadata, body_schema, check_names, converted, read_object
from gateway.http.pages import item_page
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from gateway.responses.conversations.items import kept_items
from gateway.responses.conversations.state import ConversationState
from gateway.responses.conversations.store import StoredConversations
from gateway.responses.store import NoItemError

CONVERSATIONS: Final = "/v1/conversations"
MOST_ITEMS: Final = 20
"""The most items of one request, as OpenAI has it."""


class NewConversation(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/conversations`."""

    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class OtherMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/conversations/{id}`."""

    metadata: Metadata | None


class MoreItems(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/conversations/{id}/items`."""

    items: list[dict[str, Any]]


def conversation_routes(gateway: Gateway, second: SecondLog) -> APIRouter:
    """The routes of one gateway; `second` is its connection for their events."""
    router = APIRouter(prefix=CONVERSATIONS, tags=["OpenAI"])

    def stored(request: Request) -> StoredConversations:
        return StoredConversations(gateway, second, key_name(request.scope))

    @router.post("", summary="Begin a conversation", openapi_extra=body_schema(NewConversation))
    async def create(request: Request) -> dict[str, Any]:
        body = converted(await _fields(request, NewConversation), NewConversation)
        items = _items(body.items) if body.items else []
        return _document(await stored(request).create(body.metadata or {}, items))

    @router.get("/{conversation_id}", summary="A conversation")
    async def conversation(request: Request, conversation_id: str) -> dict[str, Any]:
        return _document(await stored(request).one(conversation_id))

    @router.post(
        "/{conversation_id}", summary="Change its metadata", openapi_extra=body_schema(OtherMetadata)
    )
    async def update(request: Request, conversation_id: str) -> dict[str, Any]:
        body = converted(await _fields(request, OtherMetadata), OtherMetadata)
        conversations = stored(request)
        state = await conversations.one(conversation_id)
        return _document(await conversations.change(state, metadata=body.metadata or {}))

    @router.delete("/{conversation_id}", summary="Delete a conversation")
    async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
        conversations = stored(request)
        await conversations.delete(await conversations.one(conversation_id))
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @router.post("/{conversation_id}/items", summary="Add items", openapi_extra=body_schema(MoreItems))
    async def add(request: Request, conversation_id: str) -> dict[str, Any]:
        items = _items(converted(await _fields(request, MoreItems), MoreItems).items)
        conversations = stored(request)
        await conversations.change(await conversations.one(conversation_id), added=items)
        return item_page(items, MOST_ITEMS, "asc", "")

    @router.get("/{conversation_id}/items", summary="Its items")
    async def items_(
        request: Request, conversation_id: str, limit: int = 20, order: str = "desc", after: str = ""
    ) -> dict[str, Any]:
        conversations = stored(request)
        found = await conversations.items(await conversations.one(conversation_id))
        return item_page(found.items, limit, order, after)

    @router.get("/{conversation_id}/items/{item_id}", summary="One item")
    async def item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        conversations = stored(request)
        return await _item(conversations, await conversations.one(conversation_id), item_id)

    @router.delete("/{conversation_id}/items/{item_id}", summary="Remove an item")
    async def remove(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        conversations = stored(request)
        state = await conversations.one(conversation_id)
        await _item(conversations, state, item_id)
        return _document(await conversations.change(state, removed=[item_id]))

    return router


async def _fields(request: Request, kind: type[msgspec.Struct]) -> dict[str, Any]:
    fields = await read_object(request) if await request.body() else {}
    check_names("body", fields, kind.__struct_fields__)
    return fields


def _items(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not 1 <= len(found) <= MOST_ITEMS:
        raise InvalidParamError("items", f"items: expected 1 to {MOST_ITEMS} items, found {len(found)}")
    try:
        return kept_items(found)
    except InvalidParamError as error:
        where = str(error.param).replace("input", "items", 1)
        message = error.message.replace("input", "items", 1)
        raise InvalidParamError(where, message, code=error.code, status=error.status) from error


async def _item(conversations: StoredConversations, state: ConversationState, item_id: str) -> dict[str, Any]:
    for one in (await conversations.items(state)).items:
        if one["id"] == item_id:
            return one
    raise NoItemError("item_id", item_id)


def _document(state: ConversationState) -> dict[str, Any]:
    assert state.created is not None, "a conversation that is shown was created"
    return {
        "id": state.id,
        "object": "conversation",
        "created_at": state.created.created_s,
        "metadata": state.metadata,
    }
