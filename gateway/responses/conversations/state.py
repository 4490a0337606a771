"""The state of a conversation, as the events on its subject determine it. Pure."""

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Any

from shared.events import (
    AnyEvent,
    ConversationChanged,
    ConversationCreated,
    ConversationDeleted,
    MalformedEventError,
)
from shared.log.port import StoredRecord
from shared.subject_rules import read_event
from shared.subjects import Subjects


@dataclass(slots=True)
class Turn:
    """A response that continued the conversation.

    Attributes:
        items: its input.
        output: its output, once a later event has it.
        time_ns: when the turn was stored.
    """

    response_id: str
    items: list[dict[str, Any]]
    time_ns: int
    output: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class ConversationState:
    """One conversation.

    Attributes:
        created: None if the log has forgotten its beginning.
        entries: items, and turns in their places.
        removed: the ids of removed items.
        last_seq: the position of the last event.
    """

    id: str
    created: ConversationCreated | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    entries: list[dict[str, Any] | Turn] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    is_deleted: bool = False
    last_seq: int = 0
    _event_ids: set[str] = field(default_factory=set)

    @property
    def turns(self) -> list[Turn]:
        return [entry for entry in self.entries if isinstance(entry, Turn)]

    def turn(self, response_id: str) -> Turn | None:
        """The turn of a response, if it is one of this conversation."""
        return next((turn for turn in self.turns if turn.response_id == response_id), None)

    def fold(self, seq: int, time_ns: int, event: AnyEvent) -> None:
        """Apply an event, in the log's order; a repeated one changes nothing."""
        self.last_seq = max(self.last_seq, seq)
        if event.id in self._event_ids:
            return
        self._event_ids.add(event.id)
        match event:
            case ConversationCreated() if self.created is None:
                self.created, self.metadata = event, event.metadata
                self.entries += event.items
            case ConversationChanged():
                self._change(event, time_ns)
            case ConversationDeleted():
                self.is_deleted = True
            case _:
                pass

    def _change(self, event: ConversationChanged, time_ns: int) -> None:
        for turn in self.turns:
            turn.output = event.settled.get(turn.response_id, turn.output)
        if event.response is not None:
            self.entries.append(Turn(event.response, event.added, time_ns))
        else:
            self.entries += event.added
        self.removed.update(event.removed)
        if event.metadata is not None:
            self.metadata = event.metadata


async def folded(
    conversation_id: str, records: AsyncIterable[StoredRecord], subjects: Subjects
) -> ConversationState:
    """The state by the records on the conversation's subject."""
    state = ConversationState(conversation_id)
    async for record in records:
        try:
            _, event = read_event(record, subjects)
        except MalformedEventError:
            continue
        state.fold(record.seq, record.time_ns, event)
    return state
