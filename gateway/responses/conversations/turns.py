"""A response that continues a conversation, from its request to its place on the log."""

from dataclasses import dataclass
from typing import Any

from gateway.responses.conversations.items import kept_items
from gateway.responses.conversations.state import ConversationState
from gateway.responses.conversations.store import ConversationLockedError, Items, StoredConversations
from gateway.responses.request import ResponsesRequest


@dataclass(frozen=True, slots=True)
class NewTurn:
    """The turn that a request asks for.

    Attributes:
        read: the conversation before it.
        items: its input.
        is_known: the conversation has it: the client asks for the same response again.
    """

    conversations: StoredConversations
    state: ConversationState
    read: Items
    items: list[dict[str, Any]]
    is_known: bool

    @classmethod
    async def of(cls, conversations: StoredConversations, asked: ResponsesRequest) -> "NewTurn":
        """Return the turn of a request.

        Raises:
            NoConversationError: there is no such conversation.
            ConversationLockedError: another response of it is in progress.
            InvalidParamError: an item of the input is malformed, or not supported.
            LogUnavailableError: the log does not answer.
        """
        state = await conversations.one(asked.conversation_id or "", "conversation")
        known = state.turn(asked.request_id) if asked.request_id is not None else None
        read = await conversations.items(state, until=known)
        if known is None and read.is_locked:
            raise ConversationLockedError(state.id)
        items = [] if asked.input is None else kept_items(asked.input)
        return cls(conversations, state, read, items, is_known=known is not None)

    async def begin(self, response_id: str) -> None:
        """Store that the response continues the conversation.

        Raises:
            ConversationLockedError: another one does, since this one's request was read.
            ClientError: the input is too large for one event.
            LogUnavailableError: the log does not answer.
        """
        if not self.is_known:
            await self.conversations.begin_turn(self.state, response_id, self.items, self.read)
