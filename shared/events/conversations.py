"""Events about conversations: the items that several responses have in common (ADR 83).

`gateway.responses.conversations` writes and reads them. Each is stored only behind the last one that its
writer has read (`expected_last_seq`). No decision of the conductor depends on them.
"""

from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from shared.events.base import Event
from shared.ids import ID_PATTERN


class ConversationCreated(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="conversation.created.v1", tag_field="type"
):
    """A client began a conversation.

    Attributes:
        created_s: in seconds since 1970.
        tenant: the name of the API key; None in a deployment without keys.
        metadata: the client's own notes.
        items: its first items, in OpenAI's form and with their ids.
    """

    created_s: int
    tenant: Annotated[str, Meta(max_length=64)] | None = None
    metadata: dict[str, str] = {}
    items: list[dict[str, Any]] = []


class ConversationChanged(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="conversation.changed.v1", tag_field="type"
):
    """A conversation got items, lost some, or got other metadata.

    Attributes:
        added: new items. With a `response` they are its input: they and its output belong to the conversation
            once it is complete.
        response: the id of a response that continues the conversation.
        settled: by the id of an earlier response, its output: it need not be read again.
        removed: the ids of items that are removed.
        metadata: the new metadata; None leaves it as it is.
    """

    added: list[dict[str, Any]] = []
    response: Annotated[str, Meta(pattern=ID_PATTERN)] | None = None
    settled: dict[str, list[dict[str, Any]]] = {}
    removed: list[str] = []
    metadata: dict[str, str] | None = None


class ConversationDeleted(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="conversation.deleted.v1", tag_field="type"
):
    """A client deleted the conversation. It is shown no more; its events leave the log with their age."""


ConversationEvent: TypeAlias = ConversationCreated | ConversationChanged | ConversationDeleted
