"""Events about batches: files of requests that gateways submit line by line (`gateway.batches`, ADR 82).

Every event of a batch is stored only if it follows the last one that its writer has read
(`expected_last_seq`), so that of two gateways that run one batch, one stops. No decision of the conductor
depends on them.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shared.events.base import Event
from shared.events.decisions import Usage

Digest: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class BatchProblem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a batch as a whole failed."""

    code: str
    message: str


class BatchCreated(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.created.v1", tag_field="type"
):
    """A client asked for a batch. The gateway `writer` runs it until another one claims it.

    Attributes:
        endpoint: the route of its lines, such as `/v1/chat/completions`.
        input: the digest of the file with its lines, in the media store.
        window: the completion window as the client wrote it, such as `24h`.
        created_s: when the client asked, in seconds since 1970.
        expires_s: when lines without an answer expire, in seconds since 1970.
        tenant: the name of the API key; None in a deployment without keys.
        metadata: the client's own notes.
    """

    endpoint: Annotated[str, Meta(max_length=256)]
    input: Digest
    window: Annotated[str, Meta(max_length=16)]
    created_s: int
    expires_s: int
    tenant: Annotated[str, Meta(max_length=64)] | None = None
    metadata: dict[str, str] = {}


class BatchClaimed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.claimed.v1", tag_field="type"
):
    """The gateway `writer` runs the batch from here on: its last gateway was silent."""


class BatchChecked(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.checked.v1", tag_field="type"
):
    """The file of a batch was read, and its lines begin to run.

    Attributes:
        lines: their number.
    """

    lines: Annotated[int, Meta(ge=1)]


class SegmentStored(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.segment.stored.v1", tag_field="type"
):
    """All lines of a segment have their results, and these are in the media store.

    A segment with fewer results is the last one of a batch whose file was deleted while it ran.

    Attributes:
        segment: the segment's number, from 0.
        completed: the number of lines with an answer.
        failed: the number of lines with an error; `expired` of those among them whose time was over.
        output: the digest of the answers; None if there are none.
        errors: the digest of the errors; None if there are none.
        models: the names of the models that answered, each once.
        usage: the tokens of the answers; None in older logs.
    """

    segment: Annotated[int, Meta(ge=0)]
    completed: Annotated[int, Meta(ge=0)]
    failed: Annotated[int, Meta(ge=0)]
    expired: Annotated[int, Meta(ge=0)] = 0
    output: Digest | None = None
    errors: Digest | None = None
    models: list[str] = []
    usage: Usage | None = None


class BatchCancelled(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.cancelled.v1", tag_field="type"
):
    """A client cancelled the batch. Lines without an answer get an error instead."""


class BatchEnded(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.ended.v1", tag_field="type"
):
    """Every line of the batch has its result, or the batch failed as a whole.

    Attributes:
        status: how it ended.
        output: the digest of the file of answers; None if there are none.
        errors: the digest of the file of errors; None if there are none.
        problems: why it failed as a whole.
    """

    status: Literal["completed", "failed", "expired", "cancelled"]
    output: Digest | None = None
    errors: Digest | None = None
    problems: list[BatchProblem] = []


BatchEvent: TypeAlias = (
    BatchCreated | BatchClaimed | BatchChecked | SegmentStored | BatchCancelled | BatchEnded
)
