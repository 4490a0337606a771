"""Conversations on the log. It is the only store, so every gateway answers the same.

A conversation belongs to the API key that began it: for other keys it does not exist. The items of a response
that continues it are its own once the response is complete. Until then the conversation is locked, so that no
second response continues from the same place.
"""

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from gateway.requests.relay import RequestForgottenError
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from gateway.requests.status import log_timeout
from gateway.responses.conversations.state import ConversationState, Turn, folded
from gateway.responses.store import NoResponseError, StoredResponses
from shared.errors import ClientError
from shared.events import (
    ConversationChanged,
    ConversationCreated,
    ConversationDeleted,
    ConversationEvent,
    encode,
)
from shared.ids import is_token
from shared.log.port import WrongLastSequenceError

_SUBMISSION_NS: Final = 30 * 10**9
"""The time in which the response of a turn must be on the log; after it the turn was given up."""
_OPEN: Final = ("waiting", "running", "cancelling")


class NoConversationError(ClientError):
    """There is no such conversation, or it is another tenant's."""

    code = "conversation_not_found"
    status = 404

    def __init__(self, conversation_id: str, param: str = "conversation_id") -> None:
        super().__init__(
            f"there is no conversation {conversation_id[:80]!r} here: it was deleted, was never begun with "
            "this API key, or is older than the log"
        )
        self.param = param


class ConversationLockedError(ClientError):
    """Another response continues the conversation at this moment."""

    code = "conversation_locked"
    status = 409
    param = "conversation"

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"conversation: another response of {conversation_id} is in progress, or began at this moment; "
            "try again when it is complete"
        )


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a conversation.

    Attributes:
        items: without those of responses that are not complete.
        settled: the outputs of responses that were read for this.
        is_locked: a response is in progress.
    """

    items: list[dict[str, Any]]
    settled: dict[str, list[dict[str, Any]]]
    is_locked: bool


@dataclass(frozen=True, slots=True)
class StoredConversations:
    """The conversations of one tenant; None is that of a deployment without keys."""

    gateway: Gateway
    second: SecondLog
    tenant: str | None

    async def create(self, metadata: dict[str, str], items: list[dict[str, Any]]) -> ConversationState:
        """Begin a conversation.

        Raises:
            ClientError: the items are too large for one event.
            CapacityError: the log is full, or does not answer.
        """
        now_s = int(time.time())
        state = ConversationState(f"conv-{now_s:08x}-{secrets.token_hex(8)}")
        event = ConversationCreated(
            id=self._event_id(),
            writer=self.gateway.origin,
            created_s=now_s,
            tenant=self.tenant,
            metadata=metadata,
            items=items,
        )
        await self._publish(state, event)
        return await self.one(state.id)

    async def one(self, conversation_id: str, param: str = "conversation_id") -> ConversationState:
        """Return a conversation.

        Raises:
            NoConversationError: there is none, or the log holds it no more.
            LogUnavailableError: the log does not answer.
        """
        if not is_token(conversation_id):
            raise NoConversationError(conversation_id, param)
        subject = self.gateway.subjects.conversation(conversation_id)
        async with log_timeout(), aclosing(self.gateway.log.history([subject])) as records:
            state = await folded(conversation_id, records, self.gateway.subjects)
        if state.created is None or state.is_deleted or state.created.tenant != self.tenant:
            raise NoConversationError(conversation_id, param)
        return state

    async def items(self, state: ConversationState, until: Turn | None = None) -> Items:
        """The items of a conversation; those before a turn, if there is one.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        found: list[dict[str, Any]] = []
        settled: dict[str, list[dict[str, Any]]] = {}
        is_locked = False
        for entry in state.entries:
            if entry is until:
                break
            if not isinstance(entry, Turn):
                found.append(entry)
                continue
            output = entry.output
            if output is None:
                output, is_open = await self._output(entry)
                is_locked = is_locked or is_open
                if output is not None:
                    settled[entry.response_id] = output
            if output is not None:
                found += [*entry.items, *output]
        kept = [item for item in found if item["id"] not in state.removed]
        return Items(kept, settled, is_locked)

    async def change(self, state: ConversationState, **changed: Any) -> ConversationState:
        """Store a change of a conversation, behind whatever else changed it meanwhile.

        Raises:
            NoConversationError: it was deleted meanwhile.
            ClientError: the change is too large for one event.
            LogUnavailableError: the log does not answer.
        """
        event = ConversationChanged(id=self._event_id(), writer=self.gateway.origin, **changed)
        return await self._store(state, event)

    async def begin_turn(
        self, state: ConversationState, response_id: str, items: Sequence[dict[str, Any]], read: Items
    ) -> None:
        """Store that a response continues a conversation from where it was `read`.

        Raises:
            ConversationLockedError: the conversation changed meanwhile.
            ClientError: the items are too large for one event.
            LogUnavailableError: the log does not answer.
        """
        event = ConversationChanged(
            id=self._event_id(),
            writer=self.gateway.origin,
            response=response_id,
            added=list(items),
            settled=read.settled,
        )
        try:
            await self._publish(state, event)
        except WrongLastSequenceError as error:
            raise ConversationLockedError(state.id) from error

    async def delete(self, state: ConversationState) -> None:
        """Delete a conversation; its responses stay."""
        await self._store(state, ConversationDeleted(id=self._event_id(), writer=self.gateway.origin))

    async def _store(self, state: ConversationState, event: ConversationEvent) -> ConversationState:
        while True:
            try:
                await self._publish(state, event)
            except WrongLastSequenceError:
                state = await self.one(state.id)
                continue
            if isinstance(event, ConversationDeleted):
                return state
            return await self.one(state.id)

    async def _publish(self, state: ConversationState, event: ConversationEvent) -> None:
        async with log_timeout():
            await self.second.log.publish(
                self.gateway.subjects.conversation(state.id),
                encode(event),
                expected_last_seq=state.last_seq,
                waits_while_full=False,
            )

    async def _output(self, turn: Turn) -> tuple[list[dict[str, Any]] | None, bool]:
        """The output of a turn's response; None without one. True if it may still come."""
        responses = StoredResponses(self.gateway, self.tenant)
        try:
            # The items of a deleted response are the conversation's.
            found = await responses.one(turn.response_id, with_deleted=True)
        except (NoResponseError, RequestForgottenError):
            return None, time.time_ns() - turn.time_ns < _SUBMISSION_NS
        if found.part.status != "finished":
            return None, found.part.status in _OPEN
        output: list[dict[str, Any]] = (await responses.document(found))["output"]
        return output, False

    def _event_id(self) -> str:
        return f"{self.gateway.origin}.{secrets.token_hex(8)}"
