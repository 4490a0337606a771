"""Events on a request's output subject: chunks of the answer, and fences that void chunks."""

from typing import Any

import msgspec

from shared.events.base import Event


class OutputTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A summary of an output: its number of chunks, and their digest (`shared.transcript`).

    Attributes:
        form: what the digest covers: 1 everything that a client sees; 0, in logs that are older than the
            field, all but the chunks' `metadata`.
    """

    chunks: int = 0
    digest: str = ""
    form: int = 0


class LikelyToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token and its natural log probability. `token` is its bytes, which may be part of a character."""

    id: int
    token: bytes
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log probabilities at one position of the output.

    Attributes:
        logprob: raw log-softmax of the logits, before temperature and filters; None for a prompt's first
            token.
        top: the likeliest tokens at that position, in descending order.
    """

    id: int
    token: bytes
    logprob: float | None = None
    top: list[LikelyToken] = []


class OutputChunk(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="output.chunk.v1", tag_field="type"
):
    """A piece of the answer. `index` counts its track's chunks from 0, across all attempts.

    Attributes:
        track: the name of one of several outputs that are written concurrently. Empty if the model has one
            output node.
        token_offset: the number of earlier tokens of this choice.
        text_offset: the number of earlier characters (code points) of this choice.
        logprobs: one entry per entry of `token_ids`, if requested. In a chunk of an echo, which has `echo` in
            its metadata and no `token_ids`, one entry per prompt token.
        data: bytes of a modality other than text.
        metadata: what a client needs to read `data` (sample rate, shape).
        advisory: the chunk is no part of the answer: progress, a preview, or a checkpoint of a worker
            (`shared.checkpoints`). It counts in no totals, is never compared, and may be missing. Its `index`
            is -1.
    """

    choice: int = 0
    modality: str = "text"
    text: str = ""
    text_offset: int = 0
    token_ids: list[int] = []
    token_offset: int = 0
    logprobs: list[TokenLogprobs] | None = None
    data: bytes | None = None
    metadata: dict[str, Any] = {}
    track: str = ""
    advisory: bool = False

    @property
    def is_echo(self) -> bool:
        """True for a piece of the prompt, false for a piece of the answer."""
        return bool(self.metadata.get("echo"))


class OutputFence(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="output.fence.v1", tag_field="type"
):
    """Voids chunks of earlier attempts: those with a lower `attempt` that are stored after this event.

    Attributes:
        lives: as in `RequestAdmitted`: the writers of the new attempt. Empty if the request is held: then
            nobody may write until its `request.resumed`.
    """

    reason: str
    history: bytes
    lives: dict[str, int] = {}
